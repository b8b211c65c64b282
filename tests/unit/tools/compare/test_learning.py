"""What a run has learned and when, and how long runs take to a reward, by numbers worked by hand.

The reward of a run is 0.01 + slope x step in each step, so that the mean of five steps up to step k is
0.01 + slope x (k - 2); its k-th step ends (k - 1) x seconds after the first.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from support.comparison import SIZE, comparison, finished, logged

from seamless_verl.tools.compare.comparison import ArmFacts, Comparison, Run, RunState
from seamless_verl.tools.compare.figures import StepFigures, learned, seconds_so_far, step_figures
from seamless_verl.tools.compare.learning import (
    TimeToTarget,
    best_rates,
    collapse,
    reward_points,
    targets,
    times_to_target,
)
from seamless_verl.tools.compare.report import target_lines


def missed(one: TimeToTarget) -> int:
    return sum(point is None for point in one.reached.values())


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
    assert (ours.seconds, missed(ours)) == (7.0, 1), "the median of 5, 7 and never"
    assert ours.reached[2, 1] is None and ours.ratio is not None
    assert (ours.ratio.values, ours.ratio.median) == (3, pytest.approx(7 / 22)), "its bad seed counts in the ratio, too"
    assert ours.ratio.highest == math.inf
    runs[-1] = run("seamless", 3, slope=0.001, seconds=1)
    _, ours = times_to_target(compared(*runs))
    assert (ours.seconds, ours.samples, missed(ours)) == (None, None, 2)
    assert ours.ratio is not None and ours.ratio.median == math.inf


def failed(arm: str, seed: int) -> Run:
    return Run(arm, seed, 1, RunState.FAILED, reason="code 1")


def test_a_run_that_failed_did_not_reach_it() -> None:
    runs = [run("sync", seed, slope=0.01, seconds=2) for seed in (1, 2, 3)]
    runs += [run("seamless", 1, slope=0.03, seconds=1), failed("seamless", 2), failed("seamless", 3)]
    _, ours = times_to_target(compared(*runs))
    assert (len(ours.reached), missed(ours), ours.seconds) == (3, 2, None)
    assert ours.ratio is not None and ours.ratio.median == math.inf
    (_, ours) = times_to_target(compared(run("sync", 1, slope=0.01, seconds=2), failed("seamless", 1)))
    assert (missed(ours), ours.seconds) == (1, None)
    not_made = Run("seamless", 1, 1, RunState.NOT_MADE)
    assert [one.arm for one in times_to_target(compared(run("sync", 1, slope=0.01, seconds=2), not_made))] == ["sync"]


def test_where_the_baseline_alone_does_not_reach_it_the_ratio_is_0() -> None:
    runs = [run("sync", 1, slope=0.02, seconds=2), run("sync", 2, slope=0.001, seconds=2), failed("sync", 3)]
    runs += [run("seamless", seed, slope=0.02, seconds=1) for seed in (1, 2, 3)]
    _, ours = times_to_target(compared(*runs, target=0.1))
    assert ours.ratio is not None and (ours.ratio.values, ours.ratio.median, ours.ratio.highest) == (3, 0.0, 0.5)
    neither = compared(run("sync", 1, slope=0.01, seconds=2), run("seamless", 1, slope=0.01, seconds=2), target=0.9)
    assert [one.ratio for one in times_to_target(neither)] == [None, None]


def test_the_target_of_a_baseline_that_collapsed_is_the_highest_reward_that_it_had() -> None:
    """Its end, 0.034, any arm would reach. Its mean of five steps was highest after step 8: 0.01 + 0.02 x 6."""
    log = logged(12, seconds=1.0, reward=0.02)
    for row in log[8:]:
        row["data"]["critic/score/mean"] = 0.0
    one = compared(finished("sync", 1, log), run("seamless", 1, slope=0.01, seconds=1))
    assert targets(one) == {(1, 1): pytest.approx(0.13)}
    _, ours = times_to_target(one)
    assert missed(ours) == 1


def test_validations_count_and_the_seconds_without_them_are_beside() -> None:
    """Half of each step of ours is a validation, meanwhile it generates."""
    log = logged(12, seconds=1.0, reward=0.03)
    for row in log:
        row["data"]["timing_s/testing"] = 0.5
    sync, ours = times_to_target(compared(run("sync", 1, slope=0.01, seconds=2), finished("seamless", 1, log)))
    assert (sync.seconds, sync.training_s) == (22.0, 22.0)
    assert (ours.seconds, ours.training_s) == (5.0, 2.5)
    assert ours.ratio is not None and ours.training_ratio is not None
    assert (ours.ratio.median, ours.training_ratio.median) == (pytest.approx(5 / 22), pytest.approx(2.5 / 22))


def test_arms_with_different_numbers_of_steps_have_no_target() -> None:
    short = finished("seamless", 1, logged(9, seconds=1.0, reward=0.03))
    for target in (None, 0.05):
        one = compared(run("sync", 1, slope=0.01, seconds=2), short, target=target)
        assert targets(one) == {} and times_to_target(one) == [] and list(target_lines(one)) == []


def test_a_target_of_the_users_holds_for_all() -> None:
    """0.06 after step 7 of 2 s, and after step 4, but five steps have a mean only after step 5."""
    sync, ours = times_to_target(
        compared(run("sync", 1, slope=0.011, seconds=2), run("seamless", 1, slope=0.03, seconds=1), target=0.06)
    )
    assert (sync.seconds, ours.seconds) == (12.0, 4.0)


def test_without_a_baseline_there_is_no_target() -> None:
    assert times_to_target(compared(run("seamless", 1, slope=0.01, seconds=1))) == []


def test_a_learning_rate_that_one_seed_survived_is_not_the_best() -> None:
    """With lr=2 ours is faster in the one run of three that did not fail."""
    facts = {
        f"{system} lr={rate}": ArmFacts(baseline=f"sync lr={rate}", rate=rate, system=system)
        for rate in "12"
        for system in ("sync", "ours")
    }
    runs = [run(f"sync lr={rate}", seed, slope=0.01, seconds=2) for rate in "12" for seed in (1, 2, 3)]
    runs += [run("ours lr=1", seed, slope=0.02, seconds=1) for seed in (1, 2, 3)]
    runs += [run("ours lr=2", 1, slope=0.04, seconds=1), failed("ours lr=2", 2), failed("ours lr=2", 3)]
    one = replace(compared(*runs), baseline="sync lr=1", arms=facts)
    assert {best.system: best.rate for best in best_rates(one)}["ours"] == "1"


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


VALIDATION = "val/a/reward/mean@1"


def steps_of(
    rewards: list[float], *, seconds: float = 2.0, validations: dict[int, float] | None = None
) -> list[StepFigures]:
    """The steps of a run with these training rewards, and validations of 0.5 s each by step."""
    log = logged(len(rewards), seconds=seconds)
    for row, reward in zip(log, rewards, strict=True):
        row["data"]["critic/score/mean"] = reward
    for step, value in (validations or {}).items():
        log[step - 1]["data"] |= {VALIDATION: value, "timing_s/testing": 0.5}
        for row in log[step - 1 :]:
            row["at"] += 0.5
    return step_figures(log, SIZE, lambda began, ended: None)


def test_seconds_are_those_of_steps_since_the_end_of_the_first_with_validations_and_without() -> None:
    steps = steps_of([0.0] * 4, validations={1: 0.1, 3: 0.2})
    assert seconds_so_far(steps) == {1: 0.0, 2: 2.0, 3: 4.5, 4: 6.5}
    assert seconds_so_far(steps, validations=False) == {1: 0.0, 2: 2.0, 3: 4.0, 4: 6.0}


def test_a_reward_is_the_mean_of_the_last_five_steps_samples() -> None:
    points = reward_points(steps_of([0.0, 0.1, 0.2, 0.3, 0.4, 0.6]))
    assert [(point.step, point.samples, point.seconds) for point in points] == [(5, 640, 8.0), (6, 768, 10.0)]
    assert [point.reward for point in points] == pytest.approx([0.2, 0.32])  # 1.0 / 5, 1.6 / 5


def test_with_three_validations_it_is_the_mean_of_the_last_three_and_the_last_point_is_what_the_run_learned() -> None:
    steps = steps_of([0.9] * 8, validations={2: 0.1, 4: 0.2, 6: 0.6, 8: 0.4})
    points = reward_points(steps)
    assert [point.step for point in points] == [6, 8]
    assert [point.reward for point in points] == pytest.approx([0.3, 0.4])
    assert learned(steps)[0] == pytest.approx(points[-1].reward)
    of_samples = steps_of([0.0, 0.1, 0.2, 0.3, 0.4, 0.6])
    assert learned(of_samples)[0] == pytest.approx(reward_points(of_samples)[-1].reward)


def test_a_run_that_ends_below_half_of_its_best_has_collapsed() -> None:
    fallen = collapse(reward_points(steps_of([0.4] * 5 + [0.0] * 3)))  # 0.4, 0.32, 0.24, 0.16
    assert fallen is not None and (fallen.best.step, fallen.end.step) == (5, 8)
    assert (fallen.best.reward, fallen.end.reward) == (pytest.approx(0.4), pytest.approx(0.16))
    assert collapse(reward_points(steps_of([0.4] * 5 + [0.0, 0.0, 0.4]))) is None  # 0.24 at the end
    assert collapse(reward_points(steps_of([0.0] * 6))) is None and collapse([]) is None
    assert collapse(reward_points(steps_of([-0.9, -0.8, -0.7, -0.6, -0.5, -0.4]))) is None
