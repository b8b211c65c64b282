"""The processes of runs: started with an owner that ends them, watched by the file that they log to, ended on a signal.

verl's file logger writes a line at the very end of a step, unbuffered; a line that is written beside the next step says
how much later that is. The file is polled every `POLL_INTERVAL_S`, so a step's end is known to that accuracy, and the
time between two ends includes everything.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

POLL_INTERVAL_S = 0.02
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_S = 60.0  # from asking a run to stop until it is killed; its supervisor needs up to half of it


class RunFailedError(RuntimeError):
    """A run ended with an error, or not in time; the text is the end of its log."""


@dataclass
class Tail:
    """A growing file of lines. Invariant: `read` gives each whole line once, with the time it was first seen."""

    path: Path
    offset: int = 0
    rest: bytes = b""

    def read(self) -> list[tuple[float, bytes]]:
        if not self.path.exists() or self.path.stat().st_size <= self.offset:
            return []
        now = time.monotonic()
        with self.path.open("rb") as file:
            file.seek(self.offset)
            text = file.read()
        self.offset += len(text)
        *lines, self.rest = (self.rest + text).split(b"\n")
        return [(now, line) for line in lines]


def poll_until_end(process: subprocess.Popen[bytes], timeout_s: float) -> Iterator[None]:
    """Every `POLL_INTERVAL_S` until the process ends or the time is up."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        yield
        time.sleep(POLL_INTERVAL_S)  # watching the file more closely would take time from the run's cores


@contextmanager
def managed_process(
    command: Sequence[str], *, group: bool = False, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped with the block; with `group` the whole process group that it leads."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with deferred_signals():
            process = subprocess.Popen(command, **options)
        yield process
    finally:
        if process is not None:
            stop(process, group=group)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Signals that arrive in the block are raised at its end, so that no started process is left without an owner."""
    received = list[int]()
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in handled()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for arrived in received:
            signal.raise_signal(arrived)


def stop(process: subprocess.Popen[bytes], *, group: bool = False) -> None:
    """Terminate a process that still runs, with `group` the whole group that it leads, and wait for it."""
    if process.poll() is not None:
        return
    if group:
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def handled() -> list[signal.Signals]:
    """The signals that end a run; a closed terminal's not where it is ignored, as nohup has it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if number != signal.SIGHUP or not ignored]


def exit_on_signals() -> None:
    """On a signal, exit and stop the current run; Ctrl-C too where a script started us with `&`, which ignores it."""
    for number in handled():
        signal.signal(number, exit_on_signal)


def exit_on_signal(number: int, _: FrameType | None) -> None:
    """Signal handler: raises SystemExit."""
    sys.exit(128 + number)
