"""The clock that stands still while its process does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.runtime.process import LATE_S, AwakeTime


class Outside:
    """A clock that a test advances."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_stall_counts_for_no_longer_than_a_late_beat() -> None:
    outside = Outside()
    clock = AwakeTime(now=outside)
    began = clock()
    outside.now += 1.5
    assert clock() - began == pytest.approx(1.5)
    clock.beat()
    outside.now += 500.0
    assert clock() - began == pytest.approx(1.5 + LATE_S)
    clock.beat()
    assert clock() - began == pytest.approx(1.5 + LATE_S), "a beat does not move it"
    outside.now += 1.0
    assert clock() - began == pytest.approx(2.5 + LATE_S)


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans()), max_size=50))
def test_it_never_goes_back_nor_faster_than_time_and_loses_nothing_while_beats_are_in_time(
    moments: list[tuple[float, bool]],
) -> None:
    outside = Outside()
    clock = AwakeTime(now=outside)
    before, quiet, in_time = clock(), 0.0, True
    began = before
    for seconds, beats in moments:
        outside.now += seconds
        assert before <= clock() <= before + seconds + 1e-6
        before, quiet = clock(), quiet + seconds
        in_time = in_time and quiet <= LATE_S
        if beats:
            clock.beat()
            assert clock() == before
            quiet = 0.0
    if in_time:
        assert clock() - began == pytest.approx(outside.now - 1000.0)
