"""A run's process and clock, with a short job in the place of a training one."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from seamless_verl.tools.bench.training import running
from seamless_verl.tools.bench.training.arms import Arm
from seamless_verl.tools.bench.training.running import run
from seamless_verl.tools.bench.training.settings import BenchPlan, bench_cores
from seamless_verl.tools.bench.training.workloads import WORKLOADS
from seamless_verl.tools.compare.processes import RunFailedError, exit_on_signal

JOB = """
import json, os, sys, time
options = dict(text.split("=", 1) for text in sys.argv[1:])
print("running", os.getpid(), sorted(os.sched_getaffinity(0)), os.environ["SEAMLESS_CPU_CORES"])
with open(os.environ["VERL_FILE_LOGGER_PATH"], "wb", buffering=0) as file:
    for step in range(1, int(options["+logged"]) + 1):
        time.sleep(float(options["+seconds"]))
        file.write(json.dumps({"step": step, "data": {"loss": step / 2}}).encode() + b"\\n")
time.sleep(float(options["+after"]))
sys.exit(int(options["+code"]))
"""


def plan_of(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    logged: int = 3,
    seconds: float = 0.2,
    after: float = 0.0,
    code: int = 0,
) -> BenchPlan:
    (folder / "short_job.py").write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name in ("SEAMLESS_CPU_CORES", "SEAMLESS_CPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    options = {"+logged": logged, "+seconds": seconds, "+after": after, "+code": code}
    return BenchPlan(WORKLOADS["w1"], Arm("short", "short_job", 1, options), 3, folder, folder / "run", {})


def test_steps_have_the_time_at_which_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(tmp_path, monkeypatch, seconds=1.5)
    steps = run(plan, 60.0)
    assert [(step["step"], step["data"]) for step in steps] == [(n, {"loss": n / 2}) for n in (1, 2, 3)]
    ends = [step["at"] for step in steps]
    assert all(end >= 1.5 * (n + 1) for n, end in enumerate(ends))  # never before it happened
    assert ends[2] - ends[0] > 0.3  # seen while it ran, not at its end
    assert [json.loads(line) for line in (plan.folder / "steps.jsonl").read_text().splitlines()] == steps


def test_a_run_has_the_benchs_cores_and_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, cores = plan_of(tmp_path, monkeypatch, seconds=0.0), bench_cores()
    monkeypatch.setattr(running, "bench_cores", lambda: cores[1:])  # fewer than this process has
    run(plan, 60.0)
    log = (plan.folder / "log.txt").read_text()
    assert log.startswith("running") and log.rstrip().endswith(f"{cores[1:]} {','.join(map(str, cores))}")
    (loop,) = json.loads((plan.folder / "loops.yaml").read_text())
    assert (loop["workload"], loop["record"]) == ("w1", str(plan.folder / "samples.jsonl"))


@pytest.mark.parametrize(
    ("logged", "code", "message"), [(3, 3, "code 3, 3 of 3"), (2, 0, "code 0, 2 of 3 steps\nrunning")]
)
def test_a_run_that_failed_or_stopped_early_is_no_result(
    logged: int, code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path, monkeypatch, logged=logged, seconds=0.0, code=code)
    with pytest.raises(RunFailedError, match=message):
        run(plan, 60.0)
    assert not (plan.folder / "steps.jsonl").exists()


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(tmp_path, monkeypatch, seconds=0.0, after=120.0)
    began = time.monotonic()
    with pytest.raises(RunFailedError, match="ended at the timeout of 3 s"):
        run(plan, 3.0)
    assert time.monotonic() - began < 60
    assert running_processes(plan) == []


def test_ending_the_bench_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(tmp_path, monkeypatch, seconds=0.0, after=120.0)
    before = signal.signal(signal.SIGTERM, exit_on_signal)

    def terminate() -> None:
        while not running_processes(plan):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    end = threading.Thread(target=terminate)
    end.start()
    try:
        with pytest.raises(SystemExit, match="143"):
            run(plan, 60.0)
    finally:
        end.join()
        signal.signal(signal.SIGTERM, before)
    assert running_processes(plan) == []


def running_processes(plan: BenchPlan) -> list[int]:
    """Processes in the folder of the run."""
    return [process.pid for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(plan.folder)]
