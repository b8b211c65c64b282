"""What the data planes see of generation at one moment, for the lending policy and the watchdog. Pure data."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import NamedTuple

REMEMBERED = 2048  # lengths; older ones are forgotten, since a model's lengths change while it learns


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica: its `running` calls, frozen ones too, of which `urgent` are of groups that training waits for.

    `slots` is how many calls it may run at once, 0 while it is dead, `generated` the tokens of its calls so far, and
    `longest` the tokens that its longest call is expected to generate still. It `serves` unless it is paused, loads
    weights or is dead.
    """

    replica_id: str
    running: int = 0
    urgent: int = 0
    slots: int = 0
    generated: int = 0
    longest: float = 0.0
    serves: bool = True

    def __add__(self, other: ReplicaLoad) -> ReplicaLoad:
        """The same replica as two data planes see it that share it."""
        return ReplicaLoad(
            self.replica_id,
            self.running + other.running,
            self.urgent + other.urgent,
            self.slots + other.slots,
            self.generated + other.generated,
            max(self.longest, other.longest),
            self.serves and other.serves,
        )


@dataclass(frozen=True, slots=True)
class RolloutObservation:
    """The replicas, how many calls wait for a slot, and how many groups have ended."""

    replicas: tuple[ReplicaLoad, ...] = ()
    waiting: int = 0
    finished: int = 0

    def of(self, replica_id: str) -> ReplicaLoad:
        """That replica's load; an empty one for a replica that no data plane knows."""
        return next((load for load in self.replicas if load.replica_id == replica_id), ReplicaLoad(replica_id))


def merged(observations: Iterable[RolloutObservation]) -> RolloutObservation:
    """What several data planes see that share their replicas."""
    loads: dict[str, ReplicaLoad] = {}
    waiting = finished = 0
    for observation in observations:
        waiting, finished = waiting + observation.waiting, finished + observation.finished
        for load in observation.replicas:
            loads[load.replica_id] = loads.get(load.replica_id, ReplicaLoad(load.replica_id)) + load
    return RolloutObservation(tuple(loads.values()), waiting, finished)


class LengthForecast:
    """How many tokens a running call still has to generate, foreseen from the last `REMEMBERED` calls that ended.

    It is the mean residual life: of all calls that grew longer than this one is now, the mean of what they had still to
    go. A call that is longer than all of them is taken to be half done.
    """

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)
        self._sorted: list[int] = []
        self._sums: list[int] = [0]  # of the first i sorted lengths
        self._current = True

    def add(self, length: int) -> None:
        """A call has ended with so many tokens."""
        self._lengths.append(length)
        self._current = False

    def remaining(self, produced: int, limit: int | None = None) -> float:
        """Tokens that a call with `produced` tokens still generates, at most `limit`."""
        if not self._current:
            self._sorted, self._current = sorted(self._lengths), True
            self._sums = [0, *accumulate(self._sorted)]
        below = bisect_right(self._sorted, produced)
        longer = len(self._sorted) - below
        expected = (self._sums[-1] - self._sums[below]) / longer - produced if longer else float(produced)
        return expected if limit is None else min(expected, limit)


class CallWait(NamedTuple):
    """A call of the session `key` and the prompt `group`: since its last token, or since it waits for a slot ("" as
    `replica`).
    """

    call_id: str
    key: str
    group: str
    replica: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Counts of one engine since it listens: tokens of prompts, those of them that were in the cache, and preempted
    requests, whose blocks were lost and are computed again; of drafts the tokens, those of them that were accepted,
    among these those that a sample of the same prompt went on with, and the engine's seconds that all this saved.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    preempted: int = 0
    drafted: int = 0
    accepted: int = 0
    of_prompt: int = 0
    saved_s: float = 0.0


class CacheUseOfAll:
    def __init__(self) -> None:
        self._last: dict[str, CacheUse] = {}
        self._sum = CacheUse()

    def look(self, replica_id: str, now: CacheUse) -> None:
        """Adds what an engine has counted since the last look."""
        counts = zip(astuple(self._sum), astuple(now), astuple(self._last.get(replica_id, CacheUse())), strict=True)
        self._sum = CacheUse(*(before + count - last for before, count, last in counts))
        self._last[replica_id] = now

    def begins_again(self, replica_id: str) -> None:
        """Another engine takes the place of the one that was looked at, and has counted nothing."""
        self._last.pop(replica_id, None)

    def metrics(self) -> dict[str, float]:
        return {
            "cache/prompt_tokens": float(self._sum.prompt_tokens),
            "cache/cached_tokens": float(self._sum.cached_tokens),
            "cache/preempted": float(self._sum.preempted),
            "drafts/drafted": float(self._sum.drafted),
            "drafts/accepted": float(self._sum.accepted),
            "drafts/accepted_of_prompt": float(self._sum.of_prompt),
            "drafts/saved_s": self._sum.saved_s,
        }


CACHE_METRICS = frozenset(CacheUseOfAll().metrics())
