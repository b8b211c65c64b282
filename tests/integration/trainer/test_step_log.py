"""What is logged of a step: the file has all, and the console one line or verl's own."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from verl.trainer.ppo.v1 import trainer_base

from seamless_verl.runtime.step_metrics import REPORT_S, StepMetrics
from seamless_verl.tools.compare.processes import Tail
from seamless_verl.tools.compare.running import RunningJob
from seamless_verl.trainer.step_log import logging_of
from seamless_verl.trainer.step_report import StepReport

pytestmark = pytest.mark.integration
METRICS = {"critic/score/mean": 0.25, "actor/lr": 1e-3}


@pytest.mark.parametrize(("lines", "shown"), [(True, "step:3 of 80  reward 0.250\n"), (False, "step:3 - critic")])
@pytest.mark.parametrize("backends", [["console"], "console", []])
def test_the_console_has_one_line_or_verls_own_and_none_if_nobody_asked(
    lines: bool, shown: str, backends: list[str] | str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, before = StepMetrics(tmp_path / "metrics.jsonl"), trainer_base.tqdm
    with logging_of(file, lambda: 80, lines=lines, report=StepReport()):
        tracking = trainer_base.Tracking(project_name="p", experiment_name="e", default_backend=backends, config={})
        bar = trainer_base.tqdm(total=80)
        trainer_base.pprint("Initial validation metrics")
        tracking.log(data=METRICS, step=3)
        tracking.finish()
        assert bar.disable == lines
        bar.close()
    output = capsys.readouterr().out
    assert (shown in output) == bool(backends) and ("Initial" in output) != lines
    assert [(row.step, dict(row.metrics)) for row in file.rows()] == [(3, METRICS)]
    assert trainer_base.tqdm is before


def test_other_loggers_get_what_they_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "verl.jsonl"))
    with logging_of(StepMetrics(tmp_path / "metrics.jsonl"), lambda: 80, lines=True, report=StepReport()):
        backends = ["console", "file"]
        tracking = trainer_base.Tracking(project_name="p", experiment_name="e", default_backend=backends, config={})
        tracking.log(data=METRICS, step=3)
        tracking.finish()
    assert '"step":3' in (tmp_path / "verl.jsonl").read_text()


def test_a_line_that_is_written_beside_the_next_step_has_the_time_of_its_steps_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says how late it is, so that whoever reads verl's file while it grows knows when the step ended."""
    verls = tmp_path / "verl.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(verls))
    report, may_go_on = StepReport(), threading.Event()
    file = StepMetrics(tmp_path / "metrics.jsonl")
    with logging_of(file, lambda: 80, lines=True, report=report):
        tracking = trainer_base.Tracking(project_name="p", experiment_name="e", default_backend=["file"], config={})
        tracking.log(data=METRICS, step=1)
        report.open(may_go_on.wait)
        before = time.time()
        tracking.log(data=METRICS, step=2)
        after = time.time()
        assert [row.step for row in file.rows()] == [1]
        time.sleep(0.2)  # the report takes so long
        may_go_on.set()
        report.finish()
        tracking.finish()
    first, second = file.rows()
    assert REPORT_S not in first.metrics and before <= second.time <= after
    late = second.number(REPORT_S)
    assert late is not None and late >= 0.2
    job = RunningJob(None, Tail(verls), time.monotonic() - 100.0)  # type: ignore[arg-type]
    job.poll()
    assert job.steps[0]["at"] - job.steps[1]["at"] == pytest.approx(late, abs=0.001)  # both lines are seen now
