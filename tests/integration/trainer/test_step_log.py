"""What is logged of a step: the file has all, and the console one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from verl.trainer.ppo.v1 import trainer_base

from seamless_verl.runtime.step_metrics import StepMetrics
from seamless_verl.trainer.step_log import logging_of

pytestmark = pytest.mark.integration
METRICS = {"critic/score/mean": 0.25, "actor/lr": 1e-3}


@pytest.mark.parametrize("backends", [["console"], "console", []])
def test_the_console_has_one_line_and_none_if_nobody_asked(
    backends: list[str] | str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, before = StepMetrics(tmp_path / "metrics.jsonl"), trainer_base.tqdm
    with logging_of(file, lambda: 80):
        tracking = trainer_base.Tracking(project_name="p", experiment_name="e", default_backend=backends, config={})
        bar = trainer_base.tqdm(total=80)
        trainer_base.pprint("Initial validation metrics")
        tracking.log(data=METRICS, step=3)
        tracking.finish()
        assert bar.disable
        bar.close()
    output = capsys.readouterr().out
    assert output == ("step:3 of 80  reward 0.250\n" if backends else "")
    assert [(row.step, dict(row.metrics)) for row in file.rows()] == [(3, METRICS)]
    assert trainer_base.tqdm is before


def test_other_loggers_get_what_they_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "verl.jsonl"))
    with logging_of(StepMetrics(tmp_path / "metrics.jsonl"), lambda: 80):
        backends = ["console", "file"]
        tracking = trainer_base.Tracking(project_name="p", experiment_name="e", default_backend=backends, config={})
        tracking.log(data=METRICS, step=3)
        tracking.finish()
    assert '"step":3' in (tmp_path / "verl.jsonl").read_text()
