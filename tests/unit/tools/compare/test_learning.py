"""What a run has learned and when, by numbers worked by hand."""

from __future__ import annotations

import pytest
from support.comparison import SIZE, logged

from seamless_verl.tools.compare.figures import StepFigures, learned, seconds_so_far, step_figures
from seamless_verl.tools.compare.learning import collapse, first_at, reward_points

VALIDATION = "val/a/reward/mean@1"


def run(
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
    steps = run([0.0] * 4, validations={1: 0.1, 3: 0.2})
    assert seconds_so_far(steps) == {1: 0.0, 2: 2.0, 3: 4.5, 4: 6.5}
    assert seconds_so_far(steps, validations=False) == {1: 0.0, 2: 2.0, 3: 4.0, 4: 6.0}


def test_a_reward_is_reached_after_the_validations_on_the_way_too() -> None:
    points = reward_points(run([0.9] * 8, validations={2: 0.1, 4: 0.2, 6: 0.6, 8: 0.4}))
    assert [(point.seconds, point.training_s) for point in points] == [(11.5, 10.0), (16.0, 14.0)]


def test_a_reward_is_the_mean_of_the_last_five_steps_samples() -> None:
    points = reward_points(run([0.0, 0.1, 0.2, 0.3, 0.4, 0.6]))
    assert [(point.step, point.samples, point.seconds) for point in points] == [(5, 640, 8.0), (6, 768, 10.0)]
    assert [point.reward for point in points] == pytest.approx([0.2, 0.32])  # 1.0 / 5, 1.6 / 5


def test_with_three_validations_it_is_the_mean_of_the_last_three_and_the_last_point_is_what_the_run_learned() -> None:
    steps = run([0.9] * 8, validations={2: 0.1, 4: 0.2, 6: 0.6, 8: 0.4})
    points = reward_points(steps)
    assert [point.step for point in points] == [6, 8]
    assert [point.reward for point in points] == pytest.approx([0.3, 0.4])
    assert learned(steps)[0] == pytest.approx(points[-1].reward)
    of_samples = run([0.0, 0.1, 0.2, 0.3, 0.4, 0.6])
    assert learned(of_samples)[0] == pytest.approx(reward_points(of_samples)[-1].reward)


def test_a_target_is_reached_at_the_first_point_that_has_it() -> None:
    points = reward_points(run([0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.0]))  # 0.2, 0.32, 0.3
    reached = first_at(points, 0.3)
    assert reached is not None and (reached.step, reached.seconds) == (6, 10.0)
    assert first_at(points, 0.33) is None and first_at([], 0.1) is None


def test_a_run_that_ends_below_half_of_its_best_has_collapsed() -> None:
    fallen = collapse(reward_points(run([0.4] * 5 + [0.0] * 3)))  # 0.4, 0.32, 0.24, 0.16
    assert fallen is not None and (fallen.best.step, fallen.end.step) == (5, 8)
    assert (fallen.best.reward, fallen.end.reward) == (pytest.approx(0.4), pytest.approx(0.16))
    assert collapse(reward_points(run([0.4] * 5 + [0.0, 0.0, 0.4]))) is None  # 0.24 at the end
    assert collapse(reward_points(run([0.0] * 6))) is None and collapse([]) is None
    assert collapse(reward_points(run([-0.9, -0.8, -0.7, -0.6, -0.5, -0.4]))) is None
