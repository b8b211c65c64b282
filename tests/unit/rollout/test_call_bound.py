"""How many calls a replica takes: by hand, and in random looks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.rollout.call_bound import CallBound

LOOKS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 16)), max_size=40)


def test_the_first_look_only_begins() -> None:
    bound = CallBound(100)
    assert bound.look(preempted=50, ended=10, load=100) == 0 and bound.calls == 100
    assert bound.look(preempted=52, ended=20, load=100) == 2 and bound.calls == 80


def test_it_is_cut_again_only_once_the_calls_are_within_it() -> None:
    bound = CallBound(100)
    bound.look(0, 0, 100)
    assert [(bound.look(n, 0, load), bound.calls) for n, load in ((1, 100), (5, 95), (6, 81), (7, 80))] == [
        (1, 80),
        (4, 80),
        (1, 80),
        (1, 64),
    ]


def test_it_grows_by_an_eighth_for_each_call_that_ended_while_it_keeps_others_waiting() -> None:
    bound = CallBound(100)
    bound.look(0, 0, 100)
    bound.look(1, 0, 100)
    bound.look(1, 16, 79)
    assert bound.calls == 80, "one more would have been taken"
    bound.look(1, 32, 80)
    assert bound.calls == 82
    bound.look(1, 1000, 82)
    assert bound.calls == 100, "no more than it has seats"


def test_an_engine_that_was_started_again_counts_from_nothing() -> None:
    bound = CallBound(10)
    bound.look(7, 0, 10)
    assert bound.look(0, 0, 10) == 0 and bound.calls == 10
    assert bound.look(1, 0, 10) == 1 and bound.calls == 8


@given(LOOKS)
def test_one_call_is_always_taken_and_never_more_than_there_are_seats(looks: list[tuple[int, int, int]]) -> None:
    bound, preempted, ended = CallBound(16), 0, 0
    for new, left, load in looks:
        preempted, ended = preempted + new, ended + left
        bound.look(preempted, ended, load)
        assert 1 <= bound.calls <= 16
