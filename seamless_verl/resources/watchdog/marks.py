"""Marks of progress, and from them what is stuck.

Invariants:
- An item is watched from `began` to `ended`; its id is not begun twice at once.
- It is overdue when its limit has passed without progress, or its deadline has passed whatever it did.
- It stands still when it is overdue, or has said what it waits for and made no progress since.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from seamless_verl.resources.watchdog.explaining import explain
from seamless_verl.resources.watchdog.findings import Finding


class Key(NamedTuple):
    """A watched item: its kind, as call, group, replica or transition, and its id among them."""

    kind: str
    id: str

    def __str__(self) -> str:
        return f"{self.kind} '{self.id}'"


@dataclass(frozen=True, slots=True)
class Item:
    """Times are monotonic seconds; `due` is when it becomes overdue unless it makes progress."""

    began: float
    last: float
    due: float
    deadline: float = math.inf
    waits_on: tuple[Key, ...] = ()
    declared: float = -math.inf
    """when it said what it waits for"""
    holds: tuple[Key, ...] = ()

    def overdue(self, now: float) -> bool:
        return now >= min(self.due, self.deadline)

    def still(self, now: float) -> bool:
        return self.overdue(now) or (bool(self.waits_on) and self.last <= self.declared)


class Watchdog:
    """`limits` are seconds without progress by kind; a kind without one is overdue only by its items' deadlines.

    Any thread may mark and check. What has ended is no longer waited for, and an item that stands still when all
    it waited for has ended was not woken. Who waits for a key that an item holds, as a transition holds its
    replicas, waits for that item too, whether the key itself is watched or not.
    """

    def __init__(self, limits: Mapping[str, float], *, clock: Callable[[], float] = time.monotonic) -> None:
        for kind, limit in limits.items():
            if not limit > 0:
                raise ValueError(f"limits[{kind!r}]={limit!r}: give the seconds without progress that are too many")
        self._limits, self._clock, self._lock = dict(limits), clock, threading.Lock()
        self._items: dict[Key, Item] = {}

    def began(
        self,
        kind: str,
        id: str,
        deadline: float | None = None,
        *,
        waits_on: Iterable[tuple[str, str]] = (),
        holds: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Watches an item; `deadline` is the monotonic time by which it must have ended.

        Raises ValueError when it is watched already.
        """
        key, now = Key(kind, id), self._clock()
        due, last_moment = now + self._limits.get(kind, math.inf), math.inf if deadline is None else deadline
        item = replace(Item(now, now, due, last_moment), holds=_keys(holds))
        with self._lock:
            if key in self._items:
                raise ValueError(f"{key} has begun and not ended; end it before it begins again")
            self._items[key] = _waiting(item, waits_on, now)

    def progress(self, kind: str, id: str) -> None:
        """It moved. An item that is not watched, as one that has just ended, is left alone."""
        key, now = Key(kind, id), self._clock()
        with self._lock:
            if (item := self._items.get(key)) is not None:
                self._items[key] = replace(item, last=now, due=now + self._limits.get(kind, math.inf))

    def waits(self, kind: str, id: str, on: Iterable[tuple[str, str]]) -> None:
        """From now on it waits for all of these, and for nothing else; none of them: it goes on by itself."""
        key, now = Key(kind, id), self._clock()
        with self._lock:
            if (item := self._items.get(key)) is not None:
                self._items[key] = _waiting(item, on, now)

    def ended(self, kind: str, id: str) -> None:
        """It is over, well or not."""
        with self._lock:
            self._items.pop(Key(kind, id), None)

    def check(self, now: float | None = None) -> list[Finding]:
        """What is stuck, each culprit before what it holds up; empty while nothing is overdue."""
        moment = self._clock() if now is None else now
        with self._lock:
            items = dict(self._items)
        if not any(item.overdue(moment) for item in items.values()):
            return []
        return explain(items, moment)

    def __len__(self) -> int:
        return len(self._items)


def _waiting(item: Item, on: Iterable[tuple[str, str]], now: float) -> Item:
    return replace(item, waits_on=_keys(on), declared=now)


def _keys(pairs: Iterable[tuple[str, str]]) -> tuple[Key, ...]:
    return tuple(dict.fromkeys(Key(*pair) for pair in pairs))
