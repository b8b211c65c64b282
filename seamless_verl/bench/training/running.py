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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from seamless_verl.bench.training.settings import LOG_FILE, STEPS_FILE, Plan, bench_cores

LOOK_S = 0.02
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


def run(plan: Plan, timeout_s: float) -> list[dict[str, Any]]:
    """Run it to its end; what it logged, which is then in `steps.jsonl` of its folder too.

    Raises:
        RunFailedError: it failed, logged too few steps, or took longer than `timeout_s`.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    plan.write_loops()
    with (plan.folder / LOG_FILE).open("wb") as log:
        process = subprocess.Popen(
            plan.command(),
            cwd=plan.folder,
            env=plan.environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, bench_cores()),  # of whatever it starts, helpers included
        )
    started = Started(process, Tail(plan.folder / "metrics.jsonl"), time.monotonic())
    try:
        for _ in looks(process, timeout_s):
            started.look()
    finally:
        stop(process)
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
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)


def leave(number: int, _: FrameType | None) -> None:
    """Handles a signal by an exception."""
    sys.exit(128 + number)
