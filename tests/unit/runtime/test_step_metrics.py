"""The file of step metrics, and which of its metrics are the reward of a validation."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from seamless_verl.runtime.step_metrics import (
    VALIDATED,
    StepMetrics,
    plain,
    read_steps,
    reward_metrics,
    validation_reward,
)


def test_a_step_is_a_line_with_its_time(tmp_path: Path) -> None:
    file = StepMetrics.beside(str(tmp_path / "checkpoints"))
    assert file.rows() == []
    before = time.time()
    file.add(1, {"critic/score/mean": np.float32(0.5), "note": "text", "count": 3})
    values = json.loads((tmp_path / "checkpoints" / "metrics.jsonl").read_text())
    assert values["step"] == 1 and values["metrics"] == {"critic/score/mean": 0.5, "note": "text", "count": 3}
    assert before <= values["time"] <= time.time()


def test_numbers_that_json_does_not_have_are_null_and_read_as_none(tmp_path: Path) -> None:
    file = StepMetrics(tmp_path / "m.jsonl")
    file.add(1, {"a": float("nan"), "b": np.float64("inf"), "c": 2})
    (row,) = file.rows()
    assert (row.number("a"), row.number("b"), row.number("c"), row.number("d")) == (None, None, 2.0, None)
    assert "NaN" not in file.path.read_text() and "Infinity" not in file.path.read_text()


def test_a_resumed_run_continues_behind_its_checkpoint(tmp_path: Path) -> None:
    file = StepMetrics(tmp_path / "m.jsonl")
    file.resume_at(3)
    assert not file.path.exists()
    for step in range(5):
        file.add(step, {"x": step})
    with file.path.open("a") as partly:
        partly.write('{"step": 5, "ti')  # the run was killed while it wrote
    file.resume_at(2)
    file.add(3, {"x": 30})
    assert [(row.step, row.number("x")) for row in file.rows()] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert [path.name for path in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_run_from_nothing_keeps_none_of_an_earlier_ones_steps(tmp_path: Path) -> None:
    file = StepMetrics(tmp_path / "m.jsonl")
    file.add(0, {"x": 1})
    file.resume_at(0)
    assert file.rows() == []


def test_two_lines_of_a_step_are_one_step_with_the_later_values() -> None:
    lines = [
        '{"step": 2, "time": 9.0, "metrics": {"loss": 1.0, "val": 0.1}}\n',
        '{"step": 2, "time": 20.0, "metrics": {"val": 0.2}}\n',
        '{"step": 3, "time": 21.0, "metri',
    ]
    (row,) = read_steps(lines)
    assert (row.step, row.time, dict(row.metrics)) == (2, 20.0, {"loss": 1.0, "val": 0.2})


def test_a_validation_beside_training_is_of_the_step_whose_weights_it_had(tmp_path: Path) -> None:
    file, name = StepMetrics(tmp_path / "m.jsonl"), "val-core/sums/reward/mean@1"
    for step in range(4):
        ended = {name: 0.5, VALIDATED: 1.0} if step == 3 else {}
        file.add(step, {"x": step, "timing_s/testing": 0.1} | ended)
    rows = {row.step: dict(row.metrics) for row in file.rows()}
    assert rows[1] == {"x": 1, "timing_s/testing": 0.1, name: 0.5, VALIDATED: 1.0}
    assert rows[3] == {"x": 3, "timing_s/testing": 0.1}
    (before,) = [row for row in file.rows() if row.step == 3]
    file.add(3, {name: 0.7, VALIDATED: 2.0})  # as before the last step, whose own is logged with that
    rows = {row.step: dict(row.metrics) for row in file.rows()}
    assert (rows[2][name], rows[1][name]) == (0.7, 0.5) and before in file.rows(), "its step does not get longer"
    kept = StepMetrics(tmp_path / "one.jsonl")
    kept.add(3, {name: 0.5, VALIDATED: 1.0})
    assert kept.rows()[0].step == 3, "a file without that step keeps it where it is"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(np.int64(3), 3), (np.array(1.5), 1.5), (True, True), (None, None), ([1, 2], "[1, 2]"), (np.ones(2), "[1. 1.]")],
)
def test_a_metric_of_any_kind_is_something_that_json_has(value: object, expected: object) -> None:
    assert plain(value) == expected


def test_with_several_data_sources_it_is_the_mean_of_theirs() -> None:
    metrics = {"val-core/math/reward/mean@4": 0.75, "val-core/openai/gsm8k/reward/mean@4": 0.25}
    value, of = validation_reward(metrics)
    assert value == 0.5
    assert of == "the mean of val-core/math/reward/mean@4 and val-core/openai/gsm8k/reward/mean@4"


def test_a_sources_core_metric_counts_and_not_the_first_by_name() -> None:
    """`val-aux` comes first in the alphabet: fewer samples of the same source."""
    metrics = {"val-aux/math/reward/mean@1": 0.0, "val-core/math/reward/mean@4": 0.5}
    assert validation_reward(metrics) == (0.5, "val-core/math/reward/mean@4")


def test_a_source_with_an_accuracy_has_its_reward_as_an_auxiliary_metric() -> None:
    metrics = {
        "val-core/math/acc/mean@4": 0.9,
        "val-aux/math/reward/mean@2": 0.0,
        "val-aux/math/reward/mean@10": 0.5,
        "val-core/code/reward/mean@4": 0.25,
        "val-aux/math/reward/std@10": 0.3,
        "val-aux/math/reward/best@10/mean": 1.0,
    }
    assert reward_metrics(metrics) == ["val-core/code/reward/mean@4", "val-aux/math/reward/mean@10"]
    assert validation_reward(metrics)[0] == 0.375


@pytest.mark.parametrize("metrics", [{}, {"val-aux/num_turns/mean": 2.0}, {"val/a/reward/mean@1": "NaN"}])
def test_a_step_without_a_validation_has_none(metrics: dict[str, object]) -> None:
    assert validation_reward(metrics) == (None, "")
