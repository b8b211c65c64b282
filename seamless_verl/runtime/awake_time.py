"""A clock that stands still while its process does.

Deadlines for signs of life of others must not pass while nobody here can hear them: a process that was stopped, starved
or swapped out finds all of them over at the moment at which the signs themselves still wait in its sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BEAT_S = 1.0  # from a beat of the event loop to the next
LATE_S = 2.0  # after a beat without another one the clock stops


class AwakeTime:
    """Seconds in which an event loop ran, from `now`, a monotonic clock; it runs while `beat` is called often enough.

    It never goes back, and loses nothing while beats are at most `late_s` seconds apart, `LATE_S` by default.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic, late_s: float | None = None) -> None:
        self._now, self._last = now, now()
        self._awake_s = self._last  # its value at the last beat
        self._late_s = LATE_S if late_s is None else late_s

    def __call__(self) -> float:
        return self._at(self._now())

    def beat(self) -> None:
        """The process is awake: what is more than `late_s` since the last beat does not count."""
        now = self._now()
        self._awake_s, self._last = self._at(now), now

    def _at(self, now: float) -> float:
        return self._awake_s + min(now - self._last, self._late_s)

    async def run(self) -> None:
        """Beats until it is cancelled."""
        self.beat()
        while True:
            await asyncio.sleep(BEAT_S)
            self.beat()
