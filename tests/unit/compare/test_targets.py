"""How long runs take to a reward, by numbers worked by hand.

The reward of a run is 0.01 + slope x step in each step, so that the mean of five steps up to step k is
0.01 + slope x (k - 2); its k-th step ends (k - 1) x seconds after the first.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.comparison import comparison, finished, logged

from seamless_verl.compare.comparison import ArmFacts, Comparison
from seamless_verl.compare.outcome import Run
from seamless_verl.compare.targets import best_rates, targets, times_to_target


def run(arm: str, seed: int, *, slope: float, seconds: float) -> Run:
    return finished(arm, seed, logged(12, seconds=seconds, reward=slope))


def compared(*runs: Run, target: float | None = None) -> Comparison:
    return replace(comparison(runs=runs), target_reward=target)


def test_the_target_is_the_baselines_last_reward_of_the_same_seed() -> None:
    one = compared(run("sync", 1, slope=0.01, seconds=2), run("sync", 2, slope=0.02, seconds=2))
    assert targets(one) == {(1, 1): pytest.approx(0.11), (2, 1): pytest.approx(0.21)}


def test_an_arm_that_learns_faster_in_shorter_steps_is_there_earlier() -> None:
    """0.01 + 0.03 x 4 = 0.13 is the first at least 0.11: after step 6, 5 s, of 22 s that the baseline takes."""
    sync, ours = times_to_target(
        compared(run("sync", 1, slope=0.01, seconds=2), run("seamless", 1, slope=0.03, seconds=1))
    )
    assert (sync.seconds, sync.samples, sync.ratio) == (22.0, 12 * 128, None)
    assert (ours.seconds, ours.samples) == (5.0, 6 * 128)
    assert ours.ratio is not None and ours.ratio.median == pytest.approx(5 / 22)


def test_a_run_that_does_not_reach_it_is_later_than_all_that_do() -> None:
    runs = [run("sync", seed, slope=0.01, seconds=2) for seed in (1, 2, 3)]
    slopes = {1: 0.03, 2: 0.001, 3: 0.019}  # after step 6; never; 0.01 + 0.019 x 6 after step 8
    runs += [run("seamless", seed, slope=slope, seconds=1) for seed, slope in slopes.items()]
    _, ours = times_to_target(compared(*runs))
    assert (ours.seconds, ours.missed) == (7.0, 1), "the median of 5, 7 and never"
    assert ours.reached[2, 1] is None and ours.ratio is not None
    assert (ours.ratio.values, ours.ratio.median) == (2, pytest.approx((5 / 22 + 7 / 22) / 2))
    runs[-1] = run("seamless", 3, slope=0.001, seconds=1)
    _, ours = times_to_target(compared(*runs))
    assert (ours.seconds, ours.samples, ours.missed) == (None, None, 2)


def test_a_target_of_the_users_holds_for_all() -> None:
    """0.06 after step 7 of 2 s, and after step 4, but five steps have a mean only after step 5."""
    sync, ours = times_to_target(
        compared(run("sync", 1, slope=0.011, seconds=2), run("seamless", 1, slope=0.03, seconds=1), target=0.06)
    )
    assert (sync.seconds, ours.seconds) == (12.0, 4.0)


def test_without_a_baseline_there_is_no_target() -> None:
    assert times_to_target(compared(run("seamless", 1, slope=0.01, seconds=1))) == []


def test_each_system_is_compared_at_its_own_best_learning_rate() -> None:
    """The target is the higher of the baseline's two, 0.21, which its lower rate does not reach."""
    runs = [
        run("sync lr=1", 1, slope=0.01, seconds=2),
        run("ours lr=1", 1, slope=0.03, seconds=1),  # 0.01 + 0.03 x 7 = 0.22 after step 9
        run("sync lr=2", 1, slope=0.02, seconds=2),  # after step 12
        run("ours lr=2", 1, slope=0.021, seconds=1),  # 0.01 + 0.021 x 10 after step 12
    ]
    facts = {
        f"{system} lr={rate}": ArmFacts(baseline=f"sync lr={rate}", rate=rate, system=system)
        for rate in "12"
        for system in ("sync", "ours")
    }
    one = replace(compared(*runs), baseline="sync lr=1", arms=facts)
    assert targets(one) == {(1, 1): pytest.approx(0.21)}
    sync, ours = sorted(best_rates(one), key=lambda best: -best.seconds)
    assert (sync.rate, sync.seconds, sync.ratio) == ("2", 22.0, None)
    assert (ours.rate, ours.seconds) == ("1", 8.0)
    assert ours.ratio is not None and ours.ratio.median == pytest.approx(8 / 22)
