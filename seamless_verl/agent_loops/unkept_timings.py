"""verl's timers keep no measurements.

verl times each call and each score of a session with a timer of codetiming that has a name, and reads only the last
measurement. codetiming keeps all of them for statistics, for ever: 64 bytes a session of one call.
"""

from __future__ import annotations

from codetiming import Timer
from codetiming._timers import Timers  # no public name


class UnkeptTimings(Timers):  # type: ignore[misc]
    """What the timers of a process add their measurements to."""

    def add(self, name: str, value: float) -> None:
        """Nothing is kept."""


def keep_no_timings() -> None:
    """From now on, in this process."""
    Timer.timers = UnkeptTimings()
