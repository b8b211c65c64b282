"""Whether the clock of another host differs from this one, by one question and its reply. Imports no Ray."""

from __future__ import annotations

import time
from dataclasses import dataclass

CLOCK_S = 30.0  # what a clock may be off: hosts that are synchronized agree to less than a second


@dataclass(frozen=True)
class ClockReading:
    """What a process's clock said, between two times of this process's clock; seconds since 1970."""

    asked: float
    clock: float
    replied: float

    @property
    def off_s(self) -> float:
        """By how much that clock is ahead at least, negative if it is behind; 0 while it may be right."""
        return max(0.0, self.clock - self.replied) + min(0.0, self.clock - self.asked)


def describe_clock(name: str, reading: ClockReading) -> str | None:
    """The warning for a clock that is off; None for one that may be right."""
    if abs(reading.off_s) <= CLOCK_S:
        return None
    there, here = (time.strftime("%H:%M:%S", time.gmtime(at)) for at in (reading.clock, reading.replied))
    more = "ahead" if reading.off_s > 0 else "behind"
    return (
        f"the clock of {name} is {abs(reading.off_s):.0f} s {more}: {there} UTC there, {here} UTC here. Times in logs, "
        "in the journal and of devices do not agree; synchronize the clocks of the nodes (chrony, ntpd)"
    )
