"""Unions of intervals, and the sweep that makes them exclusive.

Invariant: a cover's intervals are sorted, not empty, and neither overlap nor touch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from seamless_verl.resources.ledger.activity import RANK, DeviceUse

Interval = tuple[float, float]


class IntervalSet:
    """A set of points in time, as intervals [start, end)."""

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for start, end in intervals:
            self.add(start, end)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Interval]:
        return iter(zip(self._starts, self._ends, strict=True))

    def add(self, start: float, end: float) -> float:
        """Adds an interval; returns how many seconds of it were not in yet."""
        if start >= end:
            return 0.0
        new = (end - start) - self.seconds(start, end)
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last], self._ends[first:last] = [start], [end]
        return new

    def within(self, low: float, high: float) -> list[Interval]:
        """The part of it in [low, high)."""
        first, last = bisect_right(self._ends, low), bisect_left(self._starts, high)
        return [(max(self._starts[i], low), min(self._ends[i], high)) for i in range(first, last)]

    def seconds(self, low: float, high: float) -> float:
        return sum(end - start for start, end in self.within(low, high))

    def start_of_last(self, count: int) -> float | None:
        """Where its last `count` intervals begin, None when it has no more than that."""
        return self._starts[-count] if len(self) > count else None

    def forget_before(self, time: float) -> None:
        """Drops the intervals that ended by then."""
        gone = bisect_right(self._ends, time)
        del self._starts[:gone], self._ends[:gone]


class Slice(NamedTuple):
    """A time with the same kinds throughout, the one that counts first; none is idle."""

    start: float
    end: float
    active: tuple[DeviceUse, ...]

    @property
    def kind(self) -> DeviceUse:
        return self.active[0] if self.active else DeviceUse.IDLE

    @property
    def seconds(self) -> float:
        return self.end - self.start


def sweep(covers: Mapping[DeviceUse, Iterable[Interval]], low: float, high: float) -> list[Slice]:
    """[low, high) as consecutive segments without gap; each kind's intervals lie in it and are disjoint."""
    changes = [(time, kind) for kind, intervals in covers.items() for interval in intervals for time in interval]
    changes.sort(key=lambda change: change[0])
    segments: list[Slice] = []
    active: set[DeviceUse] = set()
    begun = low
    for time, kind in changes:
        if time > begun:
            segments.append(Slice(begun, time, _ranked(active)))
            begun = time
        active ^= {kind}
    return [*segments, Slice(begun, high, _ranked(active))] if begun < high else segments


def _ranked(active: set[DeviceUse]) -> tuple[DeviceUse, ...]:
    return tuple(sorted(active, key=RANK.__getitem__))


def by_kind(segments: Iterable[Slice]) -> list[tuple[DeviceUse, float, float]]:
    """Neighbours that count as the same kind, made one: (kind, start, end)."""
    merged: list[tuple[DeviceUse, float, float]] = []
    for segment in segments:
        if merged and merged[-1][0] is segment.kind:
            merged[-1] = (segment.kind, merged[-1][1], segment.end)
        else:
            merged.append((segment.kind, segment.start, segment.end))
    return merged


class Change(NamedTuple):
    """A stretch that had been counted as one kind and now counts as another."""

    start: float
    end: float
    was: DeviceUse
    kind: DeviceUse


def changes(before: list[Slice], after: list[Slice]) -> list[Change]:
    """Where two sweeps of the same stretch of time differ."""
    found, old, new = [], by_kind(before), by_kind(after)
    i = j = 0
    while i < len(old) and j < len(new):
        (was, old_start, old_end), (kind, new_start, new_end) = old[i], new[j]
        if was is not kind:
            found.append(Change(max(old_start, new_start), min(old_end, new_end), was, kind))
        i, j = i + (old_end <= new_end), j + (new_end <= old_end)
    return found
