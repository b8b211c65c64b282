"""The figures of a run: which steps count, what a token is, what it has learned; the statistics of few runs."""

from __future__ import annotations

from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from support.comparison import SIZE, logged

from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.comparison import pair_ratios
from seamless_verl.tools.compare.figures import (
    RewardTest,
    Spread,
    StepFigures,
    check_skip,
    learned,
    of_known,
    run_figures,
    step_figures,
)


def steps_of(log: list[dict[str, object]], idle: float | None = 0.25) -> list[StepFigures]:
    return step_figures(log, SIZE, lambda began, ended: idle)


def test_only_response_tokens_of_measured_steps_count() -> None:
    log = logged(6, seconds=2.0)
    log[1]["at"] += 0.5  # a slow second step, which is not measured
    for row in log[2:]:
        row["at"] += 0.5
    found = run_figures(steps_of(log), SIZE, skip=2, idle=0.25)
    assert (found.tokens, found.seconds) == (4 * 512, 8.0)  # 1664 tokens of 128 samples: 9 of a prompt, 4 of a response
    assert found.tokens_per_s == 256 and found.step_s == 2.0 and found.start_s == 62.0


def test_the_time_of_a_validation_or_a_checkpoint_is_part_of_a_step_and_is_given_apart() -> None:
    """An asynchronous mode generates meanwhile: without that time it would train tokens that took none."""
    log = logged(4, seconds=2.0)
    log[2]["data"] |= {"timing_s/testing": 0.5, "timing_s/save_checkpoint": 0.25}
    steps = steps_of(log)
    assert [step.seconds for step in steps] == [None, 2.0, 2.0, 2.0]
    assert [step.training_s for step in steps] == [None, 2.0, 1.25, 2.0]
    found = run_figures(steps, SIZE, skip=1, idle=None)
    assert (found.seconds, found.training_s) == (6.0, 5.25)
    assert (found.tokens_per_s, found.training_tokens_per_s) == (3 * 512 / 6.0, 3 * 512 / 5.25)


def test_a_validation_before_the_first_step_is_no_step_and_times_it() -> None:
    log = [{"step": 0, "at": 60.0, "data": {"val/a/reward/mean@4": 0.1}}, *logged(3, seconds=2.0)]
    found = steps_of(log)
    assert [step.seconds for step in found] == [None, 2.0, 2.0, 2.0]
    assert run_figures(found, SIZE, skip=1, idle=None).start_s == 62.0


def test_staleness_in_updates_counts_those_of_the_step_itself() -> None:
    """Four updates a step: on-policy samples are three updates old at the last one."""
    on_policy, stale = (
        run_figures(steps_of(logged(4, seconds=1.0, staleness=s)), SIZE, skip=1, idle=None) for s in (0, 2)
    )
    assert (on_policy.staleness_updates, stale.staleness_updates) == (3, 11)
    assert stale.staleness_mean == stale.staleness_max == 2


def test_dropped_groups_and_masked_tokens_are_counted_in_tokens() -> None:
    log = logged(3, seconds=1.0, evicted=2)
    log[0]["data"]["seamless/tokens/masked_as_stale"] = 5
    assert run_figures(steps_of(log), SIZE, skip=1, idle=None).dropped_tokens == 3 * 2 * 8 * 4.0 + 5


def test_groups_count_as_dropped_for_whichever_reason() -> None:
    log = logged(3, seconds=1.0, evicted=2)
    log[0]["data"]["training/filter_groups/evicted_samples"] = 5  # also of a sampler
    log[1]["data"]["training/filter_groups/discarded_surplus_samples"] = 3
    log[2]["data"]["training/rollout_failure/evicted_samples"] = 1
    log[2]["data"]["validation/filter_groups/evicted_samples"] = 7
    assert [step.dropped_tokens for step in steps_of(log)] == [groups * 8 * 4.0 for groups in (2 + 5, 2 + 3, 2 + 1)]
    assert run_figures(steps_of(log), SIZE, skip=1, idle=None).dropped_share == 15 * 32 / (15 * 32 + 3 * 512)


def test_a_run_has_learned_what_its_last_validations_say_or_else_its_last_samples() -> None:
    log = logged(8, seconds=1.0, reward=0.1)
    assert learned(steps_of(log)) == (pytest.approx(0.01 + 0.6), "the samples of the last 5 steps")
    for step in (2, 4, 6, 8):
        log[step - 1]["data"]["val/a/reward/mean@4"] = step / 10
    of = "the last 3 validations, each val/a/reward/mean@4"
    assert learned(steps_of(log)) == (pytest.approx(0.6), of)
    for step in (2, 4, 6, 8):
        log[step - 1]["data"]["val/b/reward/mean@4"] = step / 10 + 0.2
    of = "the last 3 validations, each the mean of val/a/reward/mean@4 and val/b/reward/mean@4"
    assert learned(steps_of(log)) == (pytest.approx(0.7), of)


@pytest.mark.parametrize("skip", [0, 6, 7])
def test_a_step_must_be_left_to_measure(skip: int) -> None:
    check_skip(5, 6)
    with pytest.raises(ConfigError, match="--skip"):
        check_skip(skip, 6)


def test_a_spread_is_of_the_values_that_there_are() -> None:
    assert Spread.of([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([None]) is None and of_known(median, []) is None


def test_a_ratio_is_of_a_pair_and_not_of_two_medians() -> None:
    """A machine that becomes twice as slow changes both runs of a pair."""

    def speeds(**by_pair: float) -> Any:
        return {pair: SimpleNamespace(tokens_per_s=speed) for pair, speed in by_pair.items()}

    assert pair_ratios("tokens_per_s", speeds(a=20.0, b=10.0, c=1.0), speeds(a=10.0, b=5.0, d=1.0)) == [2.0, 2.0]
    assert pair_ratios("tokens_per_s", speeds(a=1.0), speeds(a=0.0)) == []


def test_noise_is_that_of_welchs_test() -> None:
    """Variances 0.01 and 0.0004 of two and three runs: 1.05 degrees of freedom, of which one counts."""
    found = RewardTest.of([0.4, 0.4 + 0.02**0.5], [0.48, 0.5, 0.52])
    assert found is not None and found.half_width == pytest.approx(12.71 * (0.01 / 2 + 0.0004 / 3) ** 0.5)
    assert RewardTest.of([0.5, 0.5], [0.5, 0.5]) == RewardTest(0, 0) and RewardTest.of([0.5], [0.5, 0.5]) is None
