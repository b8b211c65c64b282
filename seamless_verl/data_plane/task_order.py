"""Two orders of the tasks in a lease book, so that no request of a runner looks at all of them. Pure.

Invariant: an entry is not taken out when its task changes; it is dropped when it comes first and does not hold any
more. So each change costs O(log n), and an entry is looked at once, or again for each time its deadline was put off.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection
from itertools import count
from typing import Protocol


class Timed(Protocol):
    """What has a deadline in seconds, or none; `alarm` is the number of its entry here."""

    deadline: float | None
    alarm: int


class TaskQueue:
    """The places of queued tasks, by agent."""

    def __init__(self) -> None:
        self._places: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)

    def push(self, agent: str, place: int, task_id: str) -> None:
        """The task is queued for runners with this agent."""
        heapq.heappush(self._places[agent], (place, task_id))

    def first(self, agents: Collection[str], queued: Callable[[str], bool], ready: Callable[[str], bool]) -> str | None:
        """The ready task of the lowest place that a runner with these agents can take; None if there is none."""
        found = [entry for agent in agents if (entry := self._first_of(agent, queued, ready)) is not None]
        return min(found)[1] if found else None

    def _first_of(
        self, agent: str, queued: Callable[[str], bool], ready: Callable[[str], bool]
    ) -> tuple[int, str] | None:
        places, passed = self._places.get(agent, []), list[tuple[int, str]]()
        while places and not (queued(places[0][1]) and ready(places[0][1])):
            entry = heapq.heappop(places)
            if queued(entry[1]):  # it is not ready: rare, and only after a restart
                passed.append(entry)
        first = places[0] if places else None
        for entry in passed:
            heapq.heappush(places, entry)
        return first


class Deadlines:
    """Who has a deadline, by time. A deadline that is put off needs no call; any other change does: `set`."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Timed]] = []
        self._numbers = count(1)

    def set(self, timed: Timed) -> None:
        """Its deadline is another one, or none."""
        timed.alarm = next(self._numbers)
        if timed.deadline is not None:
            heapq.heappush(self._entries, (timed.deadline, timed.alarm, timed))

    def next(self) -> tuple[float, Timed] | None:
        """The earliest deadline, and whose it is."""
        entries = self._entries
        while entries:
            at, number, timed = entries[0]
            if timed.alarm != number or timed.deadline is None:
                heapq.heappop(entries)
            elif timed.deadline > at:
                heapq.heapreplace(entries, (timed.deadline, number, timed))
            else:
                return at, timed
        return None
