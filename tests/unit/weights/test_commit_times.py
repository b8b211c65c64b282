"""What the trainer waited for a commit: divided at the moment of the commit, each second once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.weights import commit_times
from seamless_verl.weights.commit_times import CommitTimes

COMMITTED_S = 10.0


class Clock:
    """`time`, as far as it is used."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@given(st.lists(st.integers(-5, 25), min_size=2, max_size=12, unique=True).map(sorted))
def test_waits_are_divided_at_the_commit_and_none_counts_twice(times: Sequence[int]) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_times, "time", clock)
        counted, before, behind = CommitTimes(began=0.0), 0.0, 0.0
        for since, until in zip(times[::2], times[1::2], strict=False):
            clock.now = float(until)
            counted.committed = COMMITTED_S if until >= COMMITTED_S else None
            counted.trainer_waited(float(since), for_loads=True)
            before += sum(0 <= second < COMMITTED_S for second in range(since, until))
            behind += sum(second >= COMMITTED_S for second in range(since, until))
    assert (counted.before_commit_s, counted.loads_waited_s) == (before, behind)


def test_a_wait_for_groups_counts_until_the_commit_alone() -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_times, "time", clock)
        counted = CommitTimes(began=0.0, committed=COMMITTED_S)
        clock.now = 25.0
        counted.trainer_waited(4.0, for_loads=False)
    assert (counted.before_commit_s, counted.loads_waited_s) == (6.0, 0.0)


def test_the_share_of_the_trainer_has_its_own_waits_and_those_of_its_workers() -> None:
    counted = CommitTimes(began=0.0, committed=8.0, load_s=12.0, pauses_s=[2.0, 4.0])
    counted.before_commit_s, counted.held_s = 1.0, 3.0
    metrics = counted.metrics()
    assert counted.total_s == 20.0 and metrics["trainer_s"] == 4.0
    assert metrics["trainer_share"] == 0.2 and metrics["standstill_share"] == 0.15
