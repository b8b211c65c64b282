"""Runs one job in a process, and records when each of its steps ended."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seamless_verl.tools.compare.processes import RunFailedError, Tail, managed_process, poll_until_end

LOG_FILE, METRICS_FILE = "log.txt", "logged.jsonl"  # no run's own metrics.jsonl, by which `view` knows a run
LOG_END = 3000  # characters of a failed run's log that are shown
Step = dict[str, Any]
"""{"step", "at" in seconds since the run's start, "data": verl's metrics}."""


@dataclass
class RunningJob:
    """A running job and the steps that it has logged; `on_step` is called with each of them."""

    process: subprocess.Popen[bytes]
    metrics: Tail
    began: float
    on_step: Callable[[Step], None] = lambda step: None
    steps: list[Step] = field(default_factory=list)

    def poll(self) -> None:
        """Reads the steps logged since the last call."""
        for at, line in self.metrics.read():
            logged = json.loads(line)
            self.steps.append({"at": round(at - self.began, 4), **logged})
            self.on_step(self.steps[-1])


def run_logged(
    command: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    *,
    steps: int,
    timeout_s: float,
    cores: Sequence[int] | None = None,
    cwd: Path | None = None,
    group: bool = False,
    on_start: Callable[[int, float], None] = lambda pid, began: None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> list[Step]:
    """Runs a command to its end; returns what it logged to `METRICS_FILE` in `folder`, where its log is, too.

    Args:
        steps: how many updates it must log; a validation before the first is step 0, and none of them.
        cores: those of the command and of what it starts; None leaves them as they are.
        group: whether the command leads a process group, all of which is ended with it.
        on_start: called with the process's id and the time of its start, by `time.monotonic`.

    Raises:
        RunFailedError: it failed, logged too few steps, or took longer than `timeout_s`.
    """
    with (folder / LOG_FILE).open("wb") as log:
        popen_options: dict[str, Any] = {
            "cwd": cwd,
            "env": env,
            "stdout": log,
            "stderr": subprocess.STDOUT,
            "start_new_session": group,
            # and of the processes that it starts
            "preexec_fn": None if cores is None else lambda: os.sched_setaffinity(0, cores),
        }
        with managed_process(command, group=group, **popen_options) as process:
            job = RunningJob(process, Tail(folder / METRICS_FILE), time.monotonic(), on_step)
            on_start(process.pid, job.began)
            for _ in poll_until_end(process, timeout_s):
                job.poll()
            late = process.poll() is None
    job.poll()
    updates = sum(step["step"] > 0 for step in job.steps)
    if process.returncode != 0 or updates < steps:
        end = (folder / LOG_FILE).read_text(errors="replace")[-LOG_END:]
        how = f"ended at the timeout of {timeout_s:g} s" if late else f"code {process.returncode}"
        raise RunFailedError(f"{how}, {updates} of {steps} steps\n{end}")
    return job.steps
