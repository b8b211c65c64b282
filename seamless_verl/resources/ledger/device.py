"""Device-seconds of one device, by kind, over sets of time intervals.

Invariants:
- Every moment in [started, closed) is counted under exactly one kind. Later moments wait for the next close.
- A moment in [kept_from, closed) is counted anew when a report about it arrives late. Older ones are final.
- A span that a source reported as open is assumed to go on until that source reports again or is lost.
- For each kind: reported = counted + hidden under another kind + not closed yet.
- The intervals of a set are sorted, not empty, and neither overlap nor touch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from seamless_verl.errors import IntegrityError
from seamless_verl.resources.ledger.activity import BUSY, RANK, DeviceUse, UseSpan

TOLERANCE = 0.01  # of the wall time
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


SecondsByKind = dict[DeviceUse, float]
HiddenSeconds = dict[tuple[DeviceUse, DeviceUse], float]  # (kind that counted, kind hidden under it): seconds


class DeviceLedger:
    """Seconds by kind of one device since `started`; all times are by the ledger's clock."""

    def __init__(self, name: str, started: float) -> None:
        self.name = name
        self.started = self.kept_from = self.closed = started
        self.seconds: SecondsByKind = dict.fromkeys(DeviceUse, 0.0)
        self.amended: SecondsByKind = dict.fromkeys(DeviceUse, 0.0)
        self.hidden: HiddenSeconds = {}
        self.too_late: SecondsByKind = dict.fromkeys(BUSY, 0.0)
        self._reported_seconds: SecondsByKind = dict.fromkeys(BUSY, 0.0)
        self._reported = {kind: IntervalSet() for kind in BUSY}
        self._open: dict[tuple[str, DeviceUse], float] = {}  # open spans, with the time of their last report

    def add(self, source: str, spans: Sequence[UseSpan], *, newest: bool) -> list[Change]:
        """Enters the spans of a source's report; `newest` if none with a later time was added before."""
        reported_at = [at for (owner, _), at in self._open.items() if owner == source and newest]

        def enter() -> None:
            if newest:
                self._forget_open(source)
            for span in spans:
                self._enter(span.kind, span.start, span.end)
                if newest and span.open:
                    self._open[source, span.kind] = span.end

        return self._recount(min([*reported_at, *(span.start for span in spans)], default=self.closed), enter)

    def source_lost(self, source: str) -> list[Change]:
        """Ends the source's open spans at its last report."""
        reported_at = [at for (owner, _), at in self._open.items() if owner == source]
        return self._recount(min(reported_at, default=self.closed), lambda: self._forget_open(source))

    def close(self, until: float) -> list[Slice]:
        """Counts up to `until`."""
        slices = self._sweep(self.closed, until)
        self._count(slices, 1)
        self.closed = until
        return slices

    def finalize(self, before: float, max_intervals: int) -> None:
        """Makes final what is older than `before`, or than the last `max_intervals` of a kind; only what is closed."""
        starts = (intervals.start_of_last(max_intervals) for intervals in self._reported.values())
        kept_from = min(max([self.kept_from, before, *(s for s in starts if s is not None)]), self.closed)
        for (source, kind), last in self._open.items():
            if last < kept_from:  # the assumed part has been counted for good
                self._enter(kind, last, kept_from)
                self._open[source, kind] = kept_from
        self.kept_from = kept_from
        for intervals in self._reported.values():
            intervals.forget_before(kept_from)

    def pop_amended(self) -> SecondsByKind:
        """How counts of closed periods have changed since the last call."""
        amended, self.amended = self.amended, dict.fromkeys(DeviceUse, 0.0)
        return amended

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every counted second is one kind's, and every reported one is accounted for."""
        name, wall = f"device {self.name!r}", self.closed - self.started
        lowest, allowed = min(self.seconds.values()), TOLERANCE * wall + 1e-6
        if lowest < -allowed:
            raise IntegrityError(f"{name}: a kind below zero, in ms", 0, milliseconds(lowest))
        check_closed(f"{name}: wall time", wall, self.seconds)
        for kind in BUSY:
            reported = self._reported_seconds[kind] + self._assumed_seconds(kind)
            hidden = sum(seconds for (_, under), seconds in self.hidden.items() if under is kind)
            found = self.seconds[kind] + hidden + self._reported[kind].seconds(self.closed, float("inf"))
            if abs(reported - found) > allowed:
                law = f"{name}: reported as {kind} against counted, hidden and not closed yet, in ms"
                raise IntegrityError(law, milliseconds(reported), milliseconds(found))

    def _enter(self, kind: DeviceUse, start: float, end: float) -> None:
        start = max(start, self.started)
        self.too_late[kind] += max(0.0, min(end, self.kept_from) - start) if start < self.kept_from else 0.0
        self._reported_seconds[kind] += self._reported[kind].add(max(start, self.kept_from), end)

    def _forget_open(self, source: str) -> None:
        self._open = {key: at for key, at in self._open.items() if key[0] != source}

    def _recount(self, start: float, change: Callable[[], None]) -> list[Change]:
        """Makes a change that matters from `start` on, and counts the closed time from there anew."""
        low = max(start, self.kept_from)
        if low >= self.closed:
            change()
            return []
        before = self._sweep(low, self.closed)
        change()
        after = self._sweep(low, self.closed)
        self._count(before, -1)
        self._count(after, 1)
        changes = compare_sweeps(before, after)
        for changed in changes:
            self.amended[changed.was] -= changed.end - changed.start
            self.amended[changed.kind] += changed.end - changed.start
        return changes

    def _count(self, slices: Iterable[Slice], sign: int) -> None:
        for section in slices:
            self.seconds[section.kind] += sign * section.seconds
            for under in section.active[1:]:
                self.hidden[section.kind, under] = self.hidden.get((section.kind, under), 0.0) + sign * section.seconds

    def _sweep(self, low: float, high: float) -> list[Slice]:
        return sweep({kind: self._intervals(kind, low, high) for kind in BUSY}, low, high)

    def _intervals(self, kind: DeviceUse, low: float, high: float) -> Iterable[Interval]:
        """Reported and assumed intervals of a kind in [low, high), disjoint."""
        reported = self._reported[kind].within(low, high)
        assumed = [max(at, low) for (_, open_kind), at in self._open.items() if open_kind is kind and at < high]
        return IntervalSet([*reported, (min(assumed), high)]) if assumed else reported

    def _assumed_seconds(self, kind: DeviceUse) -> float:
        """Seconds counted for open spans where nothing was reported."""
        both = sum(end - start for start, end in self._intervals(kind, self.kept_from, self.closed))
        return both - self._reported[kind].seconds(self.kept_from, self.closed)


def check_closed(what: str, expected: float, seconds: Mapping[DeviceUse, float]) -> None:
    """Raises IntegrityError unless the seconds by kind add up to `expected`, within 1% and a microsecond."""
    found = sum(seconds.values())
    if abs(expected - found) > TOLERANCE * expected + 1e-6:
        law = f"{what} against train + rollout + switch + sync + idle, in ms"
        raise IntegrityError(law, milliseconds(expected), milliseconds(found))


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
