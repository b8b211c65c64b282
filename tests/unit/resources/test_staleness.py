"""The staleness bound, held by random schedules of generations that finish in any order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.resources.staleness import StalenessBound


def worst_staleness(
    bound: StalenessBound, finishing: list[int], steps: int, *, ahead: int | None = None, enforce_bound: bool = True
) -> int:
    """Train `steps` steps; `finishing[n]` polls pass before the n-th prompt has been generated."""
    outstanding: list[tuple[int, int]] = []  # (step submitted, polls until done)
    worst, number = 0, 0
    for step in range(1, steps + 1):
        for update in range(bound.updates):
            for _ in range(bound.room(len(outstanding), ahead, update)):
                outstanding.append((step, finishing[number % len(finishing)]))
                number += 1
            while True:
                done = sorted(p for p in outstanding if p[1] <= 0)
                taken = done[: bound.batch]
                left_behind = list(outstanding)
                for prompt in taken:
                    left_behind.remove(prompt)
                waiting = any(p[1] > 0 for p in outstanding)
                kept = (
                    not enforce_bound
                    or not waiting
                    or bound.keeps(step=step, update=update, left_behind=[p[0] for p in left_behind])
                )
                if len(taken) == bound.batch and kept:
                    break
                outstanding = [(p, polls - 1) for p, polls in outstanding]
            outstanding = left_behind
            worst = max(worst, *(step - p for p, _ in taken))
    return worst


schedules = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@given(st.integers(0, 4), st.integers(1, 5), st.integers(1, 3), st.none() | st.integers(0, 5), schedules)
@settings(max_examples=300, deadline=None)
def test_no_token_is_older_than_the_bound(
    staleness: int, batch: int, updates: int, ahead: int | None, finishing: list[int]
) -> None:
    bound = StalenessBound(staleness, batch, updates)
    assert worst_staleness(bound, finishing, steps=20, ahead=ahead) <= staleness


def test_a_step_that_runs_ahead_by_less_than_the_bound_is_refilled_before_each_update() -> None:
    bound = StalenessBound(max_staleness=4, batch=4, updates=4)
    assert [bound.room(32 - 4 * update, 1, update) for update in range(4)] == [0, 4, 8, 12]
    assert [bound.room(80 - 4 * update, None, update) for update in range(4)] == [0, 0, 0, 0]
    assert bound.room(64, None, update=1) == 12
    assert [bound.room(16 - 4 * update, 0, update) for update in range(4)] == [0, 0, 0, 0], "none for a later step"


def test_without_holding_it_would_be_passed() -> None:
    finishing = [30, 0, 0, 0, 0, 0, 0]
    bound = StalenessBound(2, 2)
    assert (
        worst_staleness(bound, finishing, steps=20, enforce_bound=False)
        > 2
        >= worst_staleness(bound, finishing, steps=20)
    )


def test_a_smaller_bound_leaves_no_room_until_the_surplus_is_trained() -> None:
    bound = StalenessBound(0, 4)
    assert [bound.room(n) for n in (0, 3, 4, 8)] == [4, 1, 0, 0]
    assert bound.too_old(5, 4) and not bound.too_old(5, 5)
