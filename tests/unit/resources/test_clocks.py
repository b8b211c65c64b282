"""A clock that is off is named with both times; one that may be right is not."""

from __future__ import annotations

import pytest

from seamless_verl.resources.clocks import CLOCK_S, ClockReading, describe_clock

NOON = 12 * 3600.0


@pytest.mark.parametrize(("clock", "off"), [
    (NOON, 0.0), (NOON + 4, 0.0), (NOON + 10, 0.0), (NOON + 130, 120.0), (NOON - 120, -120.0),
])  # fmt: skip
def test_a_late_reply_makes_no_clock_wrong(clock: float, off: float) -> None:
    assert ClockReading(asked=NOON, clock=clock, replied=NOON + 10).off_s == off


def test_a_clock_that_is_off_is_described_with_both_times() -> None:
    ahead = ClockReading(NOON, NOON + 181, NOON + 1)
    assert str(describe_clock("replica-1", ahead)).startswith(
        "the clock of replica-1 is 180 s ahead: 12:03:01 UTC there, 12:00:01 UTC here. "
    )
    behind = describe_clock("actor worker 0", ClockReading(NOON, NOON - 60, NOON + 1))
    assert "is 60 s behind: 11:59:00 UTC there" in str(behind)
    assert describe_clock("replica-1", ClockReading(NOON, NOON + CLOCK_S, NOON)) is None
