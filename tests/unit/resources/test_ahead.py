"""How far generation runs ahead: as little as keeps engines busy, and never back and forth."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.resources.ahead import AheadLevel


def run(level: AheadLevel, lost: list[float], steps: int) -> list[int]:
    """The levels of so many steps of 1 s, where `lost[n]` s are lost with n steps' worth ahead."""
    levels = []
    for _ in range(steps):
        level.step_ended(1.0, lost[level.level])
        levels.append(level.level)
    return levels


def test_it_stays_where_nothing_is_lost() -> None:
    assert set(run(AheadLevel(4), [1.0, 0.04, 0.0, 0.0, 0.0], 50)) == {1}


def test_it_goes_up_as_long_as_that_gains() -> None:
    level = AheadLevel(8)
    assert run(level, [1.0, 0.5, 0.3, 0.1, 0.04, 0, 0, 0, 0], 60)[-1] == 4


def test_a_trial_without_gain_is_taken_back_for_good() -> None:
    level = AheadLevel(8)
    levels = run(level, [1.0, 0.5, 0.3, 0.29, 0, 0, 0, 0, 0], 60)
    assert max(levels) == 3 and levels[-1] == 2 and level.final
    assert run(level, [1.0] * 9, 60)[-1] == 2


def test_it_says_what_it_does_and_why() -> None:
    level = AheadLevel(2)
    said = [reason for _ in range(20) if (reason := level.step_ended(2.0, 1.0))]
    assert said == [
        "50% of the last steps were lost on engines with too few calls",
        "with one more 50% of the steps were lost, before it 50%",
    ]


def test_there_is_nothing_to_choose_on_policy_and_one_version_old() -> None:
    assert [AheadLevel(most).level for most in (0, 1, 4)] == [0, 1, 1]
    assert [AheadLevel(most).final for most in (0, 1, 4)] == [True, True, False]


def test_a_resumed_run_goes_on_at_its_level() -> None:
    first = AheadLevel(4)
    run(first, [1.0, 0.5, 0.3, 0.1, 0.0], 9)
    state = json.loads(json.dumps(first.state_dict()))
    second = AheadLevel(4)
    second.load_state_dict(state)
    assert second.state_dict() == first.state_dict() and second.level > 1
    smaller = AheadLevel(1)
    smaller.load_state_dict(state)
    assert (smaller.level, smaller.final) == (1, True), "the bound was lowered"


@given(st.lists(st.floats(0, 2), min_size=30, max_size=120), st.integers(0, 6))
def test_it_turns_at_most_once(lost: list[float], most: int) -> None:
    level = AheadLevel(most)
    levels = []
    for seconds in lost:
        level.step_ended(1.0, seconds)
        levels.append(level.level)
        assert min(1, most) <= level.level <= most
    turns = [b - a for a, b in pairwise(levels) if a != b]
    assert turns == sorted(turns, reverse=True) and turns.count(-1) <= 1 and set(turns) <= {1, -1}


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_step_of_no_time_is_left_out(seconds: float) -> None:
    level = AheadLevel(4)
    assert [level.step_ended(seconds, 1.0) for _ in range(9)] == [None] * 9
