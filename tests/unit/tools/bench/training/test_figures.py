"""From logged steps to figures, rows and the bound: each number by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.bench.training.figures import Figures, bound, figure_row, figures, reward_curve
from seamless_verl.tools.bench.training.workloads import WORKLOADS, Lognormal, Workload

EVEN = Workload("even", "ten tokens each", Lognormal(10, 0.0), longest=10, prompts=2, samples=2, seats=4)
TALKS = replace(EVEN, turns=3, tool=Lognormal(1.0, 0.0), tool_tokens=5)


def step(at: float, mean: float = 10.0, **data: float) -> dict[str, Any]:
    return {"at": at, "step": 0, "data": {"response_length/mean": mean, "critic/score/mean": at / 100, **data}}


def test_tokens_a_second_is_between_the_ends_of_steps() -> None:
    """The first of five is left out: 4 steps of 4 samples of 10 tokens, from second 100 to 112."""
    found = figures(EVEN, [step(at) for at in (100, 102, 104, 111, 112)], skip=1, trains=1)
    assert (found.tokens, found.seconds, found.tokens_per_s) == (160, 12, pytest.approx(160 / 12))
    assert found.step_s == 2  # the median of 2, 2, 7 and 1
    assert found.start_s == 100


def test_later_steps_alone_are_measured() -> None:
    found = figures(EVEN, [step(100, 50), step(101, 50), step(105, 10), step(106, 20)], skip=2, trains=1)
    assert (found.tokens, found.seconds) == (4 * (10 + 20), 5)


def test_what_tools_answered_was_not_generated() -> None:
    assert TALKS.tool_tokens_of_step == 4 * 2 * 5
    found = figures(TALKS, [step(1, 40.0), step(2, 40.0)], skip=1, trains=1)
    assert found.tokens == 4 * 40 - 40 == TALKS.generated(range(2))
    assert found.budget == 1.0


def test_the_budget_is_that_of_the_data_sets_order() -> None:
    found = figures(EVEN, [step(1, 8.0), step(2, 11.0), step(3, 8.0)], skip=1, trains=1)
    assert found.budget == pytest.approx(27 / 30)


def test_times_are_medians_of_the_steps_that_have_them() -> None:
    first = step(1, **{"timing_s/gen": 99.0, "timing_s/update_actor": 99.0, "perf/total_num_tokens": 1.0})
    rest = [
        step(at, **{"timing_s/gen": wait, "timing_s/update_actor": 0.5, "perf/total_num_tokens": 50.0})
        for at, wait in ((2, 3.0), (3, 1.0), (4, 7.0))
    ]
    found = figures(EVEN, [first, *rest], skip=1, trains=2)
    assert (found.wait_s, found.update_s, found.sync_s, found.lent_s) == (3.0, 0.5, None, None)
    assert found.update_s_per_token == pytest.approx(2 * 0.5 / 50)


def test_staleness_is_the_worst_and_drops_are_all() -> None:
    worst, dropped = "training/off_policy/trajectory_staleness_worst/max", "training/off_policy/evicted_samples"
    steps = [step(1, **{worst: 9, dropped: 3}), step(2, **{worst: 1}), step(3, **{worst: 2, dropped: 4}), step(4)]
    found = figures(EVEN, steps, skip=1, trains=1)
    assert (found.staleness, found.evicted) == (2, 7)


@pytest.mark.parametrize("skip", [0, 3, 7])
def test_something_must_be_left_to_measure(skip: int) -> None:
    with pytest.raises(ConfigError, match=rf"--skip={skip}: .*from 1 to 2"):
        figures(EVEN, [step(1), step(2), step(3)], skip=skip, trains=1)


def test_the_curve_is_the_mean_reward() -> None:
    assert reward_curve([step(10), step(20)]) == [0.1, 0.2]


def run(tokens: int, seconds: float, **others: Any) -> Figures:
    values: Mapping[str, Any] = {
        **dict.fromkeys(("wait_s", "update_s", "sync_s", "lent_s", "update_s_per_token", "staleness")),
        **{"step_s": 1.0, "evicted": 0.0, "budget": 1.0, "start_s": 60.0},
        **others,
    }
    return Figures(tokens=tokens, seconds=seconds, **values)


def test_a_ratio_is_of_the_same_round() -> None:
    """Three rounds on a machine that slows down: the ratio of medians would be 1.5, of pairs it is 2."""
    baseline = {1: run(400, 1), 2: run(200, 1), 3: run(100, 1)}
    found = figure_row("ours", {1: run(800, 1), 2: run(300, 1), 3: run(200, 1), 4: run(9, 1)}, baseline)
    assert found.ratio == 2.0
    assert (found.rounds, found.lowest, found.highest, found.tokens_per_s) == (4, 9, 800, 250)
    assert figure_row("ours", {4: run(9, 1)}, baseline).ratio is None


def test_a_row_has_medians_and_the_worst() -> None:
    runs = {
        1: run(10, 1, step_s=3.0, staleness=1, evicted=2.0, wait_s=0.5),
        2: run(10, 1, step_s=5.0, staleness=4, evicted=0.0, wait_s=0.7),
        3: run(10, 1, step_s=4.0, budget=0.9),
    }
    found = figure_row("ours", runs, runs)
    assert (found.step_s, found.staleness, found.evicted, found.budget, found.ratio) == (4.0, 4, 2.0, 1.0, 1.0)
    assert found.wait_s == pytest.approx(0.6) and found.update_s is None


def test_figures_survive_a_file() -> None:
    whole = run(160, 12.0, wait_s=1.5)
    assert Figures.from_dict(whole.as_dict()) == whole and whole.as_dict()["tokens_per_s"] == 160 / 12


def test_the_bound_by_hand() -> None:
    """4 samples x 3 turns x 10 tokens generated; with 40 of tools and 4 x 7 of prompts, 188 trained."""
    limit = bound(TALKS, steps=3, prompt_tokens=7.0, rates={1: 5.0, 4: 60.0}, update_s_per_token=0.01, devices=2)
    assert (limit.generated, limit.trained) == (120, 188)
    assert (limit.generate_s, limit.update_s) == (2.0, pytest.approx(1.88))
    assert limit.step_s == pytest.approx(1.94)
    assert limit.tokens_per_s == pytest.approx(120 / 1.94)


def test_the_bound_needs_the_rate_of_full_seats() -> None:
    with pytest.raises(ConfigError, match="none is for 64 samples in flight"):
        bound(WORKLOADS["w2"], steps=1, prompt_tokens=7, rates={32: 7000.0}, update_s_per_token=1e-4, devices=2)
