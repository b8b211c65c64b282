"""Runs one command to its end, or to the time that it has: its steps, its clock, and what is left of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from seamless_verl.tools.compare.running import RunFailedError, Step, exit_on_signal, run_logged

pytestmark = pytest.mark.integration
JOB = """
import json, os, sys, time
logged, seconds, after, code = map(float, sys.argv[1:])
print("running", flush=True)
with open(os.environ["VERL_FILE_LOGGER_PATH"], "wb", buffering=0) as file:
    for step in range(1, int(logged) + 1):
        time.sleep(seconds)
        file.write(json.dumps({"step": step, "data": {"loss": step / 2}}).encode() + b"\\n")
time.sleep(after)
sys.exit(int(code))
"""


def run(
    folder: Path, *, logged: int = 3, seconds: float = 0.0, after: float = 0.0, code: int = 0, timeout_s: float = 60.0
) -> list[Step]:
    command = [sys.executable, "-c", JOB, *map(str, (logged, seconds, after, code))]
    env = os.environ | {"VERL_FILE_LOGGER_PATH": str(folder / "logged.jsonl"), "OF_TEST": str(folder)}
    return run_logged(command, folder, env, steps=3, timeout_s=timeout_s)


def test_steps_have_the_time_at_which_they_ended(tmp_path: Path) -> None:
    steps = run(tmp_path, seconds=1.5)
    assert [(step["step"], step["data"]) for step in steps] == [(n, {"loss": n / 2}) for n in (1, 2, 3)]
    ends = [step["at"] for step in steps]
    assert all(end >= 1.5 * (n + 1) for n, end in enumerate(ends))  # never before it happened
    assert ends[2] - ends[0] > 0.3  # seen while it ran, not at its end


@pytest.mark.parametrize(
    ("logged", "code", "message"), [(3, 3, "code 3, 3 of 3"), (2, 0, "code 0, 2 of 3 steps\nrunning")]
)
def test_a_run_that_failed_or_stopped_early_is_no_result(logged: int, code: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=message):
        run(tmp_path, logged=logged, code=code)


def test_a_run_that_takes_too_long_is_ended_and_told_from_one_that_failed(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RunFailedError, match=r"^ended at the timeout of 3 s, 3 of 3 steps"):
        run(tmp_path, after=120.0, timeout_s=3.0)
    assert time.monotonic() - began < 60
    assert running_processes(tmp_path) == []


def test_a_signal_ends_the_run(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, exit_on_signal)

    def terminate() -> None:
        while not running_processes(tmp_path):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    end = threading.Thread(target=terminate)
    end.start()
    try:
        with pytest.raises(SystemExit, match="143"):
            run(tmp_path, after=120.0)
    finally:
        end.join()
        signal.signal(signal.SIGTERM, before)
    assert running_processes(tmp_path) == []


def running_processes(folder: Path) -> list[int]:
    """Processes of a run, by its environment; none that is about to become one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("OF_TEST") == str(folder):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
