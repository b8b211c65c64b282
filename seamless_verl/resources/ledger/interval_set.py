"""Sets of time intervals, and the sweep that makes the intervals of several kinds exclusive.

Invariant: the intervals of a set are sorted, not empty, and neither overlap nor touch.
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
        """Adds an interval; returns how many seconds of it are new."""
        if start >= end:
            return 0.0
        new = (end - start) - self.seconds(start, end)
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last], self._ends[first:last] = [start], [end]
        return new

    def within(self, low: float, high: float) -> list[Interval]:
        """The intervals of the set in [low, high), cut at both ends."""
        first, last = bisect_right(self._ends, low), bisect_left(self._starts, high)
        return [(max(self._starts[i], low), min(self._ends[i], high)) for i in range(first, last)]

    def seconds(self, low: float, high: float) -> float:
        return sum(end - start for start, end in self.within(low, high))

    def start_of_last(self, count: int) -> float | None:
        """The start of the last `count` intervals, None when there are no more than that."""
        return self._starts[-count] if len(self) > count else None

    def forget_before(self, time: float) -> None:
        """Drops the intervals that ended by `time`."""
        ended = bisect_right(self._ends, time)
        del self._starts[:ended], self._ends[:ended]


class Slice(NamedTuple):
    """An interval with the same active kinds throughout; the first of `active` counts, no kind means idle."""

    start: float
    end: float
    active: tuple[DeviceUse, ...]

    @property
    def kind(self) -> DeviceUse:
        return self.active[0] if self.active else DeviceUse.IDLE

    @property
    def seconds(self) -> float:
        return self.end - self.start


def sweep(intervals: Mapping[DeviceUse, Iterable[Interval]], low: float, high: float) -> list[Slice]:
    """[low, high) as consecutive slices without gap; each kind's intervals lie in it and are disjoint."""
    edges = [(time, kind) for kind, of_kind in intervals.items() for interval in of_kind for time in interval]
    edges.sort(key=lambda edge: edge[0])
    slices: list[Slice] = []
    active: set[DeviceUse] = set()
    start = low
    for time, kind in edges:
        if time > start:
            slices.append(Slice(start, time, _ranked(active)))
            start = time
        active ^= {kind}
    return [*slices, Slice(start, high, _ranked(active))] if start < high else slices


def _ranked(active: set[DeviceUse]) -> tuple[DeviceUse, ...]:
    return tuple(sorted(active, key=RANK.__getitem__))


def merge_by_kind(slices: Iterable[Slice]) -> list[tuple[DeviceUse, float, float]]:
    """(kind, start, end) of consecutive slices, neighbours of the same kind merged."""
    merged: list[tuple[DeviceUse, float, float]] = []
    for section in slices:
        if merged and merged[-1][0] is section.kind:
            merged[-1] = (section.kind, merged[-1][1], section.end)
        else:
            merged.append((section.kind, section.start, section.end))
    return merged


class Change(NamedTuple):
    """A stretch that was counted as one kind and now counts as another."""

    start: float
    end: float
    was: DeviceUse
    kind: DeviceUse


def compare_sweeps(before: list[Slice], after: list[Slice]) -> list[Change]:
    """The stretches in which two sweeps of the same time differ."""
    changes, old, new = [], merge_by_kind(before), merge_by_kind(after)
    i = j = 0
    while i < len(old) and j < len(new):
        (was, old_start, old_end), (kind, new_start, new_end) = old[i], new[j]
        if was is not kind:
            changes.append(Change(max(old_start, new_start), min(old_end, new_end), was, kind))
        i, j = i + (old_end <= new_end), j + (new_end <= old_end)
    return changes
