"""Which of verl's validation metrics are the reward: one of each data source."""

from __future__ import annotations

import pytest

from seamless_verl.runtime.step_metrics import reward_metrics, validation_reward


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
