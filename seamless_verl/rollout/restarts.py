"""Which lost replicas are started again, and when: at once, then after growing waits, and not for ever.

A replica is *lost* when its connection or its process is gone; it may come back by itself. It is *given up*, for a
`LossReason`, when it does not: its server is to be started again. It is *abandoned* once that was done too often.

Owned state: the stage of each replica on its way back, how many starts it had in a row, and counts of the run.

Invariants:
- Losses = returns + replicas that are not SERVING now.
- A replica has at most `limit` starts in a row, counted from the last time that it served for `STABLE_S`.
- Only an ABANDONED replica never comes back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from seamless_verl.errors import IntegrityError

FIRST_WAIT_S = 10.0  # before the second start in a row; the first one waits for nothing
LONGEST_WAIT_S = 300.0
STABLE_S = 30.0  # a replica that served for so long has done work: its starts count anew


class LossReason(StrEnum):
    """Why the data plane gave a replica up."""

    DIED = "died"
    """its server's process is dead, or its engine's, with which the server ends"""
    UNREACHABLE = "unreachable"
    """its server lives, but could not be connected to for long"""
    LATE = "late"
    """its server did not carry out a command in time"""
    STUCK = "stuck"
    """it served, and gave none of its calls a token for long"""


@dataclass(frozen=True)
class ReplicaLoss:
    """Why a replica was given up, in a word and in full, and for how many seconds its server had served."""

    reason: LossReason
    detail: str
    served_s: float = 0.0


class RestartStage(StrEnum):
    """Where a replica is on its way back."""

    SERVING = "serving"
    """it is not lost, or came back"""
    WAITING = "waiting"
    """it is lost, and is to be started when its wait is over"""
    STARTING = "starting"
    """its server and engine start"""
    STARTED = "started"
    """they run, and are to be connected where weights may be loaded"""
    ABANDONED = "abandoned"
    """it had as many starts in a row as are allowed"""


@dataclass
class _WayBack:
    """One replica's way back."""

    stage: RestartStage = RestartStage.SERVING
    starts: int = 0  # in a row
    due: float = 0.0  # when it may be started
    lost_at: float = 0.0


def wait_s(starts: int) -> float:
    """Seconds from a loss, or a start that failed, to the next start, after so many starts in a row."""
    return 0.0 if starts == 0 else min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (starts - 1))


class Restarts:
    """Decides for these replicas; used under its owner's lock.

    Args:
        limit: starts of a replica in a row; 0: none is started again.
        noticed_s: seconds after which a loss is noticed, by its reason: one that hung did not serve for so long.
    """

    def __init__(
        self,
        names: Iterable[str],
        limit: int,
        clock: Callable[[], float] = time.monotonic,
        noticed_s: Mapping[LossReason, float] | None = None,
    ) -> None:
        self.limit, self._clock, self._noticed_s = limit, clock, noticed_s or {}
        self._ways = {name: _WayBack() for name in names}
        self._lost: Counter[LossReason] = Counter()
        self._returns = self._failed = 0
        self._away_s = 0.0  # of the last return: from its loss until it was connected

    def stage(self, name: str) -> RestartStage:
        return self._ways[name].stage

    def lost(self, name: str, reason: LossReason, served_s: float = 0.0) -> RestartStage:
        """The data plane has given it up; changes nothing unless it was back. Returns its stage then.

        It had served for `served_s` seconds, the time until a hang was noticed included.
        """
        way, now = self._ways[name], self._clock()
        if way.stage is RestartStage.SERVING:
            self._lost[reason] += 1
            way.lost_at = now
            if served_s - self._noticed_s.get(reason, 0.0) >= STABLE_S:
                way.starts = 0
            self._schedule(way, now)
        return way.stage

    def due(self) -> list[str]:
        """The replicas that are to be started now."""
        now = self._clock()
        return [name for name, way in self._ways.items() if way.stage is RestartStage.WAITING and way.due <= now]

    def begin(self, name: str) -> int:
        """Its start begins; returns its number in the row, from 1."""
        way = self._expect(name, RestartStage.WAITING)
        way.stage = RestartStage.STARTING
        way.starts += 1
        return way.starts

    def started(self, name: str) -> None:
        self._expect(name, RestartStage.STARTING).stage = RestartStage.STARTED

    def failed(self, name: str) -> RestartStage:
        """Its start failed, or it died before it was connected. Returns its stage then: WAITING or ABANDONED."""
        way = self._expect(name, RestartStage.STARTING, RestartStage.STARTED)
        self._failed += 1
        self._schedule(way, self._clock())
        return way.stage

    def came_back(self, name: str) -> float:
        """It is connected, and gets the committed weights; returns for how many seconds it was away."""
        way = self._expect(name, RestartStage.STARTED)
        way.stage = RestartStage.SERVING
        self._returns += 1
        self._away_s = self._clock() - way.lost_at
        return self._away_s

    def next_start_s(self, name: str) -> float:
        """Seconds until its next start may begin."""
        return max(0.0, self._ways[name].due - self._clock())

    def metrics(self) -> dict[str, float]:
        """Counts of the run, and of the replicas that are on their way now."""
        stages = Counter(way.stage for way in self._ways.values())
        counts = {f"replicas/lost/{reason}": float(self._lost[reason]) for reason in LossReason}
        now = {f"replicas/{stage}": float(stages[stage]) for stage in RestartStage if stage is not RestartStage.SERVING}
        ends = {"replicas/returned": float(self._returns), "replicas/failed_starts": float(self._failed)}
        return counts | now | ends | ({"replicas/away_s": self._away_s} if self._returns else {})

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every loss is a return, or a replica that is not back."""
        away = sum(way.stage is not RestartStage.SERVING for way in self._ways.values())
        if (lost := self._lost.total()) != self._returns + away:
            raise IntegrityError("replicas lost = returned + away", lost, self._returns + away)

    def _schedule(self, way: _WayBack, now: float) -> None:
        if way.starts >= self.limit:
            way.stage = RestartStage.ABANDONED
        else:
            way.stage, way.due = RestartStage.WAITING, now + wait_s(way.starts)

    def _expect(self, name: str, *stages: RestartStage) -> _WayBack:
        way = self._ways[name]
        assert way.stage in stages, f"{name} is {way.stage}, not {' or '.join(stages)}"
        return way
