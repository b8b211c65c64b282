"""How far generation runs ahead: as little as keeps engines busy, and never back and forth."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.resources.ahead import WINDOW, AheadLevel
from seamless_verl.resources.engine_use import EngineLoss


def run(level: AheadLevel, lost: list[float], steps: int) -> list[int]:
    """The levels of so many steps of 1 s, where `lost[n]` s are lost with n steps' worth ahead."""
    levels = []
    for _ in range(steps):
        now = level.level
        fewer, more = lost[max(0, now - 1)], lost[min(len(lost) - 1, now + 1)]
        level.step_ended(1.0, EngineLoss(lost[now], fewer, more))
        levels.append(level.level)
    return levels


def test_it_begins_with_half_of_what_is_permitted() -> None:
    assert [AheadLevel(most).level for most in range(7)] == [0, 1, 1, 2, 2, 3, 3]


def test_it_goes_down_to_one_where_nothing_is_lost() -> None:
    levels = run(AheadLevel(6), [1.0, 0.04, 0.0, 0.0, 0.0, 0.0, 0.0], 50)
    assert levels[:WINDOW] == [3] * WINDOW, "one step to start, then a window"
    assert sorted(set(levels), reverse=True) == [3, 2, 1] and levels[-1] == 1


def test_it_stays_where_less_would_lose_and_more_would_gain_little() -> None:
    assert set(run(AheadLevel(4), [1.0, 0.06, 0.0, 0.0, 0.0], 50)) == {2}
    assert set(run(AheadLevel(4), [1.0, 0.9, 0.5, 0.46, 0.0], 50)) == {2}


def test_where_devices_are_idle_without_a_wait_less_is_not_safe() -> None:
    """As in steps so short that engines have nothing to do while their batch is prepared."""
    often, seldom = AheadLevel(4), AheadLevel(4)
    for step in range(60):
        often.step_ended(1.0, EngineLoss(), 0.2 if step % 3 else 0.0)
        seldom.step_ended(1.0, EngineLoss(), 0.4 if step % WINDOW == 0 else 0.05)  # a validation
    assert (often.level, seldom.level) == (2, 1)


def test_one_long_sample_in_six_steps_speaks_against_less() -> None:
    level = AheadLevel(4)
    for step in range(60):
        level.step_ended(1.0, EngineLoss(0.0, 0.3 if step % WINDOW == 0 else 0.0))
    assert level.level == 2


def test_it_goes_up_as_long_as_that_gains() -> None:
    levels = run(AheadLevel(5), [1.0, 0.9, 0.7, 0.5, 0.3, 0.04], 60)
    assert levels[-1] == 5 and levels == sorted(levels)


def test_it_goes_up_again_when_samples_become_longer() -> None:
    level = AheadLevel(4)
    assert run(level, [1.0, 0.0, 0.0, 0.0, 0.0], 30)[-1] == 1
    assert run(level, [1.0, 0.4, 0.2, 0.01, 0.0], 60)[-1] == 3


def test_losses_that_more_would_not_save_drive_it_nowhere() -> None:
    """A share of the steps waits for a sample so long that nothing else is left to do."""
    for seed in range(50):
        chance, level = random.Random(seed), AheadLevel(4)
        for _ in range(60):
            lost = 0.3 if chance.random() < 0.3 else 0.0
            level.step_ended(1.0, EngineLoss(lost, lost + 0.1, lost * 0.9))
        assert level.level == 2


def test_it_says_what_it_does_and_why() -> None:
    up, down = AheadLevel(4), AheadLevel(4)
    said = [up.step_ended(2.0, EngineLoss(1.0, 2.0, 0.4)) for _ in range(WINDOW + 1)]
    assert said[-1] == "one more would have kept engines from losing 30% of the last steps"
    said = [down.step_ended(2.0, EngineLoss(0.0, 0.04, 0.0)) for _ in range(WINDOW + 1)]
    assert said[-1] == "with one fewer engines would have lost 2% of a step at most"


def test_a_resumed_run_goes_on_at_its_level() -> None:
    first = AheadLevel(6)
    run(first, [1.0, 0.9, 0.8, 0.7, 0.5, 0.3, 0.0], 9)
    state = json.loads(json.dumps(first.state_dict()))
    second = AheadLevel(6)
    second.load_state_dict(state)
    assert second.state_dict() == first.state_dict() and second.level > 3


@pytest.mark.parametrize(("most", "level"), [(0, 0), (1, 1), (3, 3), (8, 4)])
def test_a_resumed_run_may_have_another_bound(most: int, level: int) -> None:
    resumed = AheadLevel(most)
    resumed.load_state_dict({"level": 4, "descends": True})
    assert resumed.level == level
    if most > 1:
        assert run(resumed, [0.0] * 9, 60)[-1] == 1, "it looks on"


def test_a_checkpoint_of_before_says_less() -> None:
    resumed = AheadLevel(4)
    resumed.load_state_dict({"level": 0, "final": True, "before": None})
    assert resumed.level == 1 and resumed.descends


SECONDS = st.sampled_from([0.0, 0.01, 0.04]) | st.floats(0, 2)


@given(st.lists(st.builds(EngineLoss, SECONDS, SECONDS, SECONDS), min_size=30, max_size=120), st.integers(0, 6))
def test_it_turns_at_most_once(lost: list[EngineLoss], most: int) -> None:
    level = AheadLevel(most)
    levels = [level.level]
    for of_step in lost:
        level.step_ended(1.0, of_step)
        levels.append(level.level)
        assert min(1, most) <= level.level <= most
    moves = [b - a for a, b in pairwise(levels) if a != b]
    assert moves == sorted(moves) and set(moves) <= {-1, 1}


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_step_of_no_time_is_left_out(seconds: float) -> None:
    level = AheadLevel(4)
    assert [level.step_ended(seconds, EngineLoss(1.0, 1.0)) for _ in range(9)] == [None] * 9
