"""How long the calls of each session waited because no replica worked on them: no slot, or a paused replica.

An agent's time limit does not count these seconds, since the agent can do nothing about them.

Invariants: the seconds of a session are those in which at least one of its calls waited, each counted once, until the
session is forgotten. Whoever carries them over restarts of this process itself asks for `seconds`; the others for
`total`, which begins with what an earlier process stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class _SessionClock:
    """The seconds of one session; `waiting` of its calls wait now, the first of them since `since`."""

    def __init__(self) -> None:
        self.waiting, self.since, self.total = 0, 0.0, 0.0

    def count(self, change: int, now: float) -> None:
        if self.waiting:
            self.total += now - self.since
        self.waiting, self.since = self.waiting + change, now


class WaitingCall:
    """One call, which waits or is worked on; it is worked on when it begins."""

    def __init__(self, clock: _SessionClock, now: Callable[[], float]) -> None:
        self._clock, self._now, self._waits = clock, now, False

    def set(self, waits: bool) -> None:
        if waits is not self._waits:
            self._waits = waits
            self._clock.count(1 if waits else -1, self._now())


class PausedTime:
    """The seconds of all sessions, by the key of their calls.

    `now` is the clock of the deadline to which these are added: another one may count a stop of the whole process.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self._clocks = now, dict[str, _SessionClock]()
        self._stored = dict[str, float]()  # by earlier processes, of sessions that they had open

    def begin(self, key: str, *, counted: bool = True) -> WaitingCall:
        """A call of this session begins, the waiting of which is `counted`."""
        clock = self._clocks.setdefault(key, _SessionClock()) if counted else _SessionClock()
        return WaitingCall(clock, self.now)

    def seconds(self, key: str) -> float:
        """Seconds in which a call of this session waited, up to now, since this process began."""
        clock = self._clocks.get(key)
        if clock is None:
            return 0.0
        clock.count(0, self.now())
        return clock.total

    def total(self, key: str) -> float:
        """The same with the seconds that earlier processes stored."""
        return self._stored.get(key, 0.0) + self.seconds(key)

    def forget(self, key: str) -> None:
        """Drops a session that has ended; calls of it that still end change nothing."""
        self._clocks.pop(key, None)
        self._stored.pop(key, None)

    def state_dict(self) -> dict[str, float]:
        """The totals of all sessions whose calls have waited."""
        totals = {key: self.total(key) for key in {*self._clocks, *self._stored}}
        return {key: total for key, total in totals.items() if total}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Begins with the totals of an earlier process."""
        self._stored = dict(state)
