"""How far generation runs ahead: as little as keeps engines busy, and never back and forth."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.resources.ahead import AheadLevel
from seamless_verl.trainer.engine_use import EngineLoss


def run(level: AheadLevel, lost: list[float], steps: int) -> list[int]:
    """The levels of so many steps of 1 s, where `lost[n]` s are lost with n steps' worth ahead."""
    levels = []
    for _ in range(steps):
        level.step_ended(1.0, EngineLoss(lost[level.level], lost[max(0, level.level - 1)]))
        levels.append(level.level)
    return levels


def test_it_begins_with_half_of_what_is_permitted() -> None:
    assert [AheadLevel(most).level for most in range(7)] == [0, 1, 1, 2, 2, 3, 3]


def test_it_goes_down_to_one_where_nothing_is_lost() -> None:
    levels = run(AheadLevel(6), [1.0, 0.04, 0.0, 0.0, 0.0, 0.0, 0.0], 50)
    assert levels[:6] == [3] * 6, "one step to start, then a long window"
    assert sorted(set(levels), reverse=True) == [3, 2, 1] and levels[-1] == 1


def test_it_stays_where_less_would_lose() -> None:
    assert set(run(AheadLevel(4), [1.0, 0.06, 0.0, 0.0, 0.0], 50)) == {2}


def test_one_long_sample_in_six_steps_speaks_against_less() -> None:
    level = AheadLevel(4)
    for step in range(60):
        level.step_ended(1.0, EngineLoss(0.0, 0.3 if step % 6 == 0 else 0.0))
    assert level.level == 2


def test_much_loss_needs_no_whole_window() -> None:
    assert run(AheadLevel(4), [1.0, 1.0, 0.08, 0.0, 0.0], 3) == [2, 2, 3], "0.08 twice is more than three times 0.05"
    assert run(AheadLevel(4), [1.0, 1.0, 0.06, 0.0, 0.0], 4) == [2, 2, 2, 3]


def test_it_goes_up_again_when_samples_become_longer() -> None:
    level = AheadLevel(4)
    assert run(level, [1.0, 0.0, 0.0, 0.0, 0.0], 30)[-1] == 1  # whose last window has ended
    assert run(level, [1.0, 0.4, 0.2, 0.01, 0.0], 60)[-1] == 3


def test_it_goes_up_as_long_as_that_gains() -> None:
    level = AheadLevel(5)
    assert run(level, [1.0, 0.9, 0.7, 0.5, 0.3, 0.04], 60)[-1] == 5


def test_a_trial_without_gain_is_taken_back_for_good() -> None:
    level = AheadLevel(8)
    levels = run(level, [1.0, 1.0, 1.0, 1.0, 0.5, 0.3, 0.29, 0, 0], 60)
    assert max(levels) == 6 and levels[-1] == 5 and level.final
    assert run(level, [1.0] * 9, 60)[-1] == 5


def test_it_says_what_it_does_and_why() -> None:
    level = AheadLevel(2)
    said = [reason for _ in range(20) if (reason := level.step_ended(2.0, EngineLoss(1.0, 2.0)))]
    assert said == [
        "50% of the last steps were lost on engines with too few calls",
        "with one more 50% of the steps were lost, before it 50%",
    ]


def test_there_is_nothing_to_choose_on_policy_and_one_version_old() -> None:
    assert [AheadLevel(most).final for most in (0, 1, 4)] == [True, True, False]


def test_a_resumed_run_goes_on_at_its_level() -> None:
    first = AheadLevel(6)
    run(first, [1.0, 0.5, 0.5, 0.3, 0.1, 0.0, 0.0], 9)
    state = json.loads(json.dumps(first.state_dict()))
    second = AheadLevel(6)
    second.load_state_dict(state)
    assert second.state_dict() == first.state_dict() and second.level > 3
    smaller = AheadLevel(1)
    smaller.load_state_dict(state)
    assert (smaller.level, smaller.final) == (1, True), "the bound was lowered"


SECONDS = st.sampled_from([0.0, 0.01, 0.04]) | st.floats(0, 2)


@given(st.lists(st.builds(EngineLoss, SECONDS, SECONDS), min_size=30, max_size=120), st.integers(0, 6))
def test_it_turns_at_most_twice(lost: list[EngineLoss], most: int) -> None:
    """Down, then up, then down by one at the very end."""
    level = AheadLevel(most)
    levels = [level.level]
    for of_step in lost:
        level.step_ended(1.0, of_step)
        levels.append(level.level)
        assert min(1, most) <= level.level <= most
    moves = [b - a for a, b in pairwise(levels) if a != b]
    first_up = moves.index(1) if 1 in moves else len(moves)
    assert set(moves[:first_up]) <= {-1}
    later = moves[first_up:]
    assert later == sorted(later, reverse=True) and later.count(-1) <= 1 and set(later) <= {1, -1}


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_step_of_no_time_is_left_out(seconds: float) -> None:
    level = AheadLevel(4)
    assert [level.step_ended(seconds, EngineLoss(1.0, 1.0)) for _ in range(9)] == [None] * 9
