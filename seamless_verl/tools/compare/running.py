"""The processes of runs: started with an owner that ends them, watched by the file that they log to, ended on a signal.

verl's file logger writes a line at the very end of a step, unbuffered. The file is polled every `POLL_INTERVAL_S`, so a
step's end is known to that accuracy, and the time between two ends includes everything.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

LOG_FILE, METRICS_FILE = "log.txt", "logged.jsonl"  # no run's own metrics.jsonl, by which `view` knows a run
LOG_END = 3000  # characters of a failed run's log that are shown
Step = dict[str, Any]
"""{"step", "at" in seconds since the run's start, "data": verl's metrics}."""
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


@contextmanager
def managed_process(
    command: Sequence[str], log: IO[bytes], env: Mapping[str, str], *, group: bool = True
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which is stopped with the block: with `group` all that it started, too."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with deferred_signals():
            process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
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
    """Terminates a process that still runs, with `group` the whole group that it leads, and waits for it."""
    if process.poll() is not None:
        return
    if group:
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.terminate()
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


def run_logged(
    command: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    *,
    steps: int,
    timeout_s: float,
    on_start: Callable[[int, float], None] = lambda pid, began: None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> list[Step]:
    """Runs a command to its end; returns what it logged to `METRICS_FILE` in `folder`, where its log is, too.

    `steps` is how many updates it must log: a validation before the first is step 0, and none of them. `on_start` gets
    the process's id and the time of its start, by `time.monotonic`. RunFailedError where it failed, logged too few
    steps, or took longer than `timeout_s`.
    """
    metrics, found = Tail(folder / METRICS_FILE), list[Step]()
    with (folder / LOG_FILE).open("wb") as log, managed_process(command, log, env) as process:
        began = time.monotonic()
        on_start(process.pid, began)
        running = True
        while running and time.monotonic() < began + timeout_s:
            running = process.poll() is None
            for at, line in metrics.read():  # once more after its end
                found.append({"at": round(at - began, 4), **json.loads(line)})
                on_step(found[-1])
            time.sleep(POLL_INTERVAL_S * running)  # watching the file more closely would take the run's own time
    updates = sum(step["step"] > 0 for step in found)
    if process.returncode != 0 or updates < steps:
        how = f"ended at the timeout of {timeout_s:g} s" if running else f"code {process.returncode}"
        raise RunFailedError(f"{how}, {updates} of {steps} steps\n{log_end(folder)}")
    return found


def one_a_step(logged: Sequence[Step]) -> list[Step]:
    """What a run logged with one entry for each step: the last but one may also log a validation that ended later."""
    found = dict[int, Step]()
    for step in logged:
        earlier = found.get(step["step"], {**step, "data": {}})
        found[step["step"]] = {**earlier, "data": {**earlier["data"], **step["data"]}}
    return list(found.values())


def log_end(folder: Path) -> str:
    return (folder / LOG_FILE).read_text(errors="replace")[-LOG_END:]
