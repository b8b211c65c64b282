"""One run from start to end: its process, and the moment at which each of its steps was logged.

verl's file logger writes a line as the last act of a step, unbuffered; it is looked for every `LOOK_S`, so a
step's end is known to that much, and the time between two of them includes everything, logging too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from seamless_verl.bench.training.settings import LOG_FILE, STEPS_FILE, BenchPlan, bench_cores

LOOK_S = 0.02
SIGNALS = (signal.SIGTERM, signal.SIGINT)
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


@dataclass
class Started:
    """A running job and what it has logged: {"step", "at" in seconds since its start, "data"}."""

    process: subprocess.Popen[bytes]
    metrics: Tail
    began: float
    steps: list[dict[str, Any]] = field(default_factory=list)

    def look(self) -> None:
        for at, line in self.metrics.read():
            self.steps.append({"at": round(at - self.began, 4), **json.loads(line)})


def run(plan: BenchPlan, timeout_s: float) -> list[dict[str, Any]]:
    """Run it to its end; what it logged, which is then in `steps.jsonl` of its folder too.

    Raises:
        RunFailedError: it failed, logged too few steps, or took longer than `timeout_s`.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    plan.write_loops()
    with (plan.folder / LOG_FILE).open("wb") as log:
        whole: dict[str, Any] = {
            "cwd": plan.folder,
            "env": plan.environment(),
            "stdout": log,
            "stderr": subprocess.STDOUT,
        }
        pin = partial(os.sched_setaffinity, 0, bench_cores())  # and whatever it starts, helpers included
        with process_of(plan.command(), **whole, preexec_fn=pin) as process:
            started = Started(process, Tail(plan.folder / "metrics.jsonl"), time.monotonic())
            for _ in looks(process, timeout_s):
                started.look()
    started.look()
    if process.returncode != 0 or len(started.steps) < plan.steps:
        end = (plan.folder / LOG_FILE).read_text(errors="replace")[-3000:]
        raise RunFailedError(f"code {process.returncode}, {len(started.steps)} of {plan.steps} steps\n{end}")
    text = "".join(json.dumps(step) + "\n" for step in started.steps)
    (plan.folder / STEPS_FILE).write_text(text)
    return started.steps


def looks(process: subprocess.Popen[bytes], timeout_s: float) -> Iterator[None]:
    """Every `LOOK_S` until the process ends or the time is up."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        yield
        time.sleep(LOOK_S)  # nobody tells of a line in a file; watching it more closely would take the run's cores


@contextmanager
def process_of(command: Sequence[str], *, group: bool = False, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is over with the block, or all of the `group` that it leads."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with signals_later():
            process = subprocess.Popen(command, **options)
        yield process
    finally:
        if process is not None:
            stop(process, group=group)


@contextmanager
def signals_later() -> Iterator[None]:
    """Those that come meanwhile are heard at its end: none comes between a process and the word for it."""
    came = list[int]()
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for heard in came:
            signal.raise_signal(heard)


def stop(process: subprocess.Popen[bytes], *, group: bool = False) -> None:
    """Ask a process that still runs to end, or all of the `group` that it leads, and wait for it."""
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


def leave_on_signals() -> None:
    """The run of the moment is ended too; Ctrl-C also ends what a script has begun with `&`, where it is ignored."""
    for number in SIGNALS:
        signal.signal(number, leave)


def leave(number: int, _: FrameType | None) -> None:
    """Handles a signal by an exception."""
    sys.exit(128 + number)
