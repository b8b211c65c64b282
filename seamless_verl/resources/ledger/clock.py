"""The offset between two hosts' monotonic clocks, from round trips.

Cristian, "Probabilistic clock synchronization" (1989): the other clock was read at some moment between
sending and receiving; taking the middle, the error is at most half the round trip. The quickest trip of
several bounds it best. Afterwards two quartz clocks part by at most `DRIFT` seconds a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

DRIFT = 100e-6  # two clocks, each within the usual 50 parts in a million


@dataclass(frozen=True)
class ClockOffset:
    """The other clock minus ours is `offset` +- `error` seconds, as of `at` on ours."""

    offset: float
    error: float
    at: float

    @classmethod
    def of_round_trip(cls, sent: float, theirs: float, received: float) -> ClockOffset:
        """`sent` and `received` by our clock, `theirs` what the other read in between."""
        if received < sent:
            raise ValueError(f"received={received!r} lies before sent={sent!r}: give both by the same monotonic clock")
        return cls(theirs - (sent + received) / 2, (received - sent) / 2, received)

    @classmethod
    def measure(
        cls, ask: Callable[[], float], *, trips: int = 5, clock: Callable[[], float] = time.monotonic
    ) -> ClockOffset:
        """The best of several round trips; `ask` returns the other clock's time."""
        if trips < 1:
            raise ValueError(f"trips={trips!r}: the offset comes from at least one round trip")
        return min((cls._trip(ask, clock) for _ in range(trips)), key=lambda found: found.error)

    @classmethod
    def _trip(cls, ask: Callable[[], float], clock: Callable[[], float]) -> ClockOffset:
        sent = clock()
        theirs = ask()
        return cls.of_round_trip(sent, theirs, clock())

    def here(self, theirs: float) -> float:
        """A time of the other clock, by ours."""
        return theirs - self.offset

    def error_at(self, now: float) -> float:
        """The bound on the error at `now`, in seconds: it grows while the clocks drift."""
        return self.error + abs(now - self.at) * DRIFT

    def better(self, other: ClockOffset, now: float) -> ClockOffset:
        """Whichever of the two is bounded more tightly now."""
        return self if self.error_at(now) <= other.error_at(now) else other


SAME_CLOCK = ClockOffset(0.0, 0.0, 0.0)  # processes of one host read one monotonic clock
