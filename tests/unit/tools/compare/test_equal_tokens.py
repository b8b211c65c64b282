"""Methods after as many generated tokens: by hand, and in the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.comparison import comparison, finished, logged

from seamless_verl.algorithms.samplers import sampling
from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.arms import parse_arms
from seamless_verl.tools.compare.budget import OF_A_METHOD, budget_of
from seamless_verl.tools.compare.comparison import Run
from seamless_verl.tools.compare.equal_tokens import (
    GENERATED,
    LEVELS,
    SAMPLES_OF,
    VALIDATING,
    EqualTokens,
    at_equal_tokens,
    generated_tokens,
)
from seamless_verl.tools.compare.job import Options, check_arms
from seamless_verl.tools.compare.page import markdown, page
from seamless_verl.tools.compare.report import equal_table

VALIDATION = "val-core/arithmetic/reward/mean@1"


def log_of(steps: int, tokens: int, rise: float, **metrics: float) -> list[dict[str, Any]]:
    """A run of two seconds a step that generates so many tokens in each; its validations rise by `rise` a step."""
    log = logged(steps, seconds=2.0)
    for row in log:
        row["data"] |= {GENERATED: tokens * row["step"], VALIDATION: rise * row["step"], **metrics}
    return [{"step": 0, "at": 50.0, "data": {VALIDATION: 0.0}}, *log]


def compared(logs: dict[tuple[str, int, int], list[dict[str, Any]]]) -> tuple[EqualTokens, list[Run]]:
    runs = [finished(arm, seed, log) for (arm, seed, _), log in logs.items()]
    arms = dict.fromkeys(run.arm for run in runs)
    found = at_equal_tokens({run.key: run.steps for run in runs}, logs, dict.fromkeys(arms, 8), arms, "grpo")
    assert found is not None
    return found, runs


def counted(counts: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """What a run logged of tokens of all calls, and of those of validations."""
    return [{"data": {GENERATED: every, VALIDATING: validating}} for every, validating in counts]


def two_methods() -> tuple[EqualTokens, list[Run]]:
    """`dars` generates 400 tokens a step where `grpo` generates 100, and is twice as good a step."""
    sizes = {f"{SAMPLES_OF}/hard": 19.0, f"{SAMPLES_OF}/easy": 8.0}
    logs = {("grpo", seed, 1): log_of(10, 100, 0.01 * seed) for seed in (1, 2)}
    logs |= {("dars", seed, 1): log_of(10, 400, 0.02 * seed, **sizes) for seed in (1, 2)}
    return compared(logs)


def test_arms_are_read_at_the_tokens_of_the_run_that_generated_the_fewest() -> None:
    found, _ = two_methods()
    grpo, dars = found.arms
    assert found.tokens == 1000
    assert grpo.reward is not None and dars.reward is not None and dars.seconds is not None
    assert (grpo.reward.lowest, grpo.reward.highest) == pytest.approx((0.1, 0.2)), "after all of its ten steps"
    assert (dars.reward.lowest, dars.reward.highest) == pytest.approx((0.05, 0.1)), "after two steps and a half"
    assert dars.seconds.median == pytest.approx(3.0), "since the end of the first step"
    assert dars.training_s == dars.seconds, "no validation took any time"
    assert dars.trained is not None and dars.trained.median == pytest.approx(2.5 * 512)
    assert grpo.reward_test is None and dars.reward_test is not None
    assert dars.reward_test.difference == pytest.approx(-0.075)


def test_validations_are_part_of_the_seconds_and_are_given_apart() -> None:
    """Half a second of each step of two is the validation's: after two steps and a half, 3.0 s and 2.25 s."""
    logs = {("grpo", 1, 1): log_of(10, 100, 0.01), ("dars", 1, 1): log_of(10, 400, 0.02, **{"timing_s/testing": 0.5})}
    _, dars = compared(logs)[0].arms
    assert dars.seconds is not None and dars.training_s is not None
    assert (dars.seconds.median, dars.training_s.median) == (pytest.approx(3.0), pytest.approx(2.25))


def test_samples_by_difficulty_are_the_samplers_or_those_of_every_prompt() -> None:
    grpo, dars = two_methods()[0].arms
    assert grpo.samples == dict.fromkeys(LEVELS, 8.0)
    assert dars.samples == {"none": None, "hard": 19.0, "middle": None, "easy": 8.0}
    assert LEVELS == sampling.LEVELS


def test_tokens_go_on_where_a_data_plane_began_again() -> None:
    counts = [None, 100.0, 250.0, 30.0, 90.0]
    log = [{"data": {} if one is None else {GENERATED: one}} for one in counts]
    assert generated_tokens(log) == [0, 100, 250, 280, 340]


def test_tokens_of_validations_are_no_work_of_a_method() -> None:
    counts = [(70.0, 70.0), (170.0, 70.0), (340.0, 140.0)]
    assert generated_tokens(counted(counts)) == [0, 100, 200]


@pytest.mark.parametrize("now", [(30.0, 0.0), (400.0, 20.0), (500.0, 139.0)])
def test_both_counts_begin_again_with_a_data_plane(now: tuple[float, float]) -> None:
    """Though one of them may be larger by then than before."""
    assert generated_tokens(counted([(340.0, 140.0), now])) == [200, 200 + now[0] - now[1]]


def test_without_a_finished_run_there_is_nothing() -> None:
    assert at_equal_tokens({}, {}, {"grpo": 8}, ["grpo"], "grpo") is None
    log = log_of(10, 400, 0.02)
    steps = {("dars", 1, 1): finished("dars", 1, log).steps}
    found = at_equal_tokens(steps, {("dars", 1, 1): log}, {"dars": 8}, ["grpo", "dars"], "grpo")
    assert found is not None and [arm.reward_test for arm in found.arms] == [None, None]


def test_the_report_has_the_table() -> None:
    found, runs = two_methods()
    whole = comparison(runs=runs)
    assert "generated tokens" not in markdown(whole)
    shown = replace(whole, baseline="grpo", equal_tokens=found)
    header, (grpo, dars) = equal_table(found, "grpo")
    assert dict(zip(header, dars, strict=True))["samples: hard"] == "19.0" and grpo[2] == "-"
    assert dars[1] == "0.075 (0.050-0.100)" and dars[2].startswith("-0.075 +- ")
    assert "## At 1,000 generated tokens" in markdown(shown) and f"| {' | '.join(dars)} |" in markdown(shown)
    assert "<h2>At 1,000 generated tokens</h2>" in page(shown)


def test_methods_may_differ_in_what_makes_them_and_in_nothing_else() -> None:
    loose, strict = budget_of({}, equal_tokens=True), budget_of({})
    assert strict.keys() - loose.keys() == set(OF_A_METHOD)
    assert "data.train_batch_size" in loose


def test_it_needs_validations_and_arms_of_ours() -> None:
    with pytest.raises(
        ConfigError, match=r"--validate=0: with --equal-tokens the rewards of trained samples.*--validate N"
    ):
        Options(equal_tokens=True).check()
    options = Options(equal_tokens=True, validate=5)
    options.check()
    check_arms(parse_arms("grpo:seamless.sampler.name=null,seamless:algorithm.adv_estimator=rloo"), options)
    with pytest.raises(ConfigError, match=r"--arms='sync': verl's modes do not log.*--equal-tokens"):
        check_arms(parse_arms("seamless,sync"), options)
    check_arms(parse_arms("seamless,sync"), Options())
