"""The books of one device.

Invariants:
- [started, closed) is counted, each moment under exactly one kind; later moments wait for the next close.
- A moment in [kept_from, closed) may still be counted anew when something about it arrives late.
- What a source reported as open is assumed to go on (a tail) until that source is heard of again.
- Reported = counted + hidden under another kind + not closed yet, for each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from seamless_verl.errors import IntegrityError
from seamless_verl.resources.ledger.activity import BUSY, DeviceUse, UseSpan
from seamless_verl.resources.ledger.interval_set import Change, Interval, IntervalSet, Slice, changes, sweep
from seamless_verl.resources.ledger.report import TOLERANCE, check_closed, milliseconds

Seconds = dict[DeviceUse, float]
Hidden = dict[tuple[DeviceUse, DeviceUse], float]  # (kind that counted, kind hidden under it): seconds


class DeviceLedger:
    """Seconds by kind of one device since `started`; all times are by the ledger's clock."""

    def __init__(self, name: str, started: float) -> None:
        self.name = name
        self.started = self.kept_from = self.closed = started
        self.seconds: Seconds = dict.fromkeys(DeviceUse, 0.0)
        self.amended: Seconds = dict.fromkeys(DeviceUse, 0.0)
        self.hidden: Hidden = {}
        self.too_late: Seconds = dict.fromkeys(BUSY, 0.0)
        self._reported: Seconds = dict.fromkeys(BUSY, 0.0)
        self._facts = {kind: IntervalSet() for kind in BUSY}
        self._tails: dict[tuple[str, DeviceUse], float] = {}

    def take(self, source: str, spans: Sequence[UseSpan], *, newest: bool) -> list[Change]:
        """Enters what a source did on this device; `newest` if nothing later was heard of it before."""
        tails = [seen for (owner, _), seen in self._tails.items() if owner == source and newest]

        def enter() -> None:
            if newest:
                self._drop_tails(source)
            for span in spans:
                self._enter(span.kind, span.start, span.end)
                if newest and span.open:
                    self._tails[source, span.kind] = span.end

        return self._recount(min([*tails, *(span.start for span in spans)], default=self.closed), enter)

    def lost(self, source: str) -> list[Change]:
        """Nothing is assumed of that source after what it last reported."""
        return self.take(source, (), newest=True)

    def close(self, until: float) -> list[Slice]:
        """Counts up to `until`."""
        segments = self._sweep(self.closed, until)
        self._count(segments, 1)
        self.closed = until
        return segments

    def settle(self, before: float, most: int) -> None:
        """Gives up what is older than `before`, or than the last `most` intervals; never what is not counted yet."""
        starts = (cover.start_of_last(most) for cover in self._facts.values())
        kept_from = min(max([self.kept_from, before, *(s for s in starts if s is not None)]), self.closed)
        for (source, kind), seen in self._tails.items():
            if seen < kept_from:  # what was assumed has been counted for good
                self._enter(kind, seen, kept_from)
                self._tails[source, kind] = kept_from
        self.kept_from = kept_from
        for cover in self._facts.values():
            cover.forget_before(kept_from)

    def take_amended(self) -> Seconds:
        """How counts of closed periods have changed since this was last asked."""
        amended, self.amended = self.amended, dict.fromkeys(DeviceUse, 0.0)
        return amended

    @property
    def held(self) -> int:
        """How many intervals it holds."""
        return sum(map(len, self._facts.values())) + len(self._tails)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every counted second is one kind's, and every reported one is accounted for."""
        name, wall = f"device {self.name!r}", self.closed - self.started
        lowest, allowed = min(self.seconds.values()), TOLERANCE * wall + 1e-6
        if lowest < -allowed:
            raise IntegrityError(f"{name}: a kind below zero, in ms", 0, milliseconds(lowest))
        check_closed(f"{name}: wall time", wall, self.seconds)
        for kind in BUSY:
            reported = self._reported[kind] + self._assumed(kind)
            hidden = sum(seconds for (_, under), seconds in self.hidden.items() if under is kind)
            found = self.seconds[kind] + hidden + self._pending(kind)
            if abs(reported - found) > allowed:
                law = f"{name}: reported as {kind} against counted, hidden and not closed yet, in ms"
                raise IntegrityError(law, milliseconds(reported), milliseconds(found))

    def _enter(self, kind: DeviceUse, start: float, end: float) -> None:
        start = max(start, self.started)
        self.too_late[kind] += max(0.0, min(end, self.kept_from) - start) if start < self.kept_from else 0.0
        self._reported[kind] += self._facts[kind].add(max(start, self.kept_from), end)

    def _drop_tails(self, source: str) -> None:
        self._tails = {key: seen for key, seen in self._tails.items() if key[0] != source}

    def _recount(self, start: float, change: Callable[[], None]) -> list[Change]:
        """Makes a change that matters from `start` on, and counts anew what was counted of that already."""
        low = max(start, self.kept_from)
        if low >= self.closed:
            change()
            return []
        before = self._sweep(low, self.closed)
        change()
        after = self._sweep(low, self.closed)
        self._count(before, -1)
        self._count(after, 1)
        found = changes(before, after)
        for piece in found:
            self.amended[piece.was] -= piece.end - piece.start
            self.amended[piece.kind] += piece.end - piece.start
        return found

    def _count(self, segments: Iterable[Slice], sign: int) -> None:
        for segment in segments:
            self.seconds[segment.kind] += sign * segment.seconds
            for under in segment.active[1:]:
                self.hidden[segment.kind, under] = self.hidden.get((segment.kind, under), 0.0) + sign * segment.seconds

    def _sweep(self, low: float, high: float) -> list[Slice]:
        return sweep({kind: self._known(kind, low, high) for kind in BUSY}, low, high)

    def _known(self, kind: DeviceUse, low: float, high: float) -> Iterable[Interval]:
        """Facts and tails of a kind in [low, high), disjoint."""
        facts = self._facts[kind].within(low, high)
        tails = [max(seen, low) for (_, tailed), seen in self._tails.items() if tailed is kind and seen < high]
        return IntervalSet([*facts, (min(tails), high)]) if tails else facts

    def _assumed(self, kind: DeviceUse) -> float:
        """Seconds counted for tails where there is no fact."""
        known = sum(end - start for start, end in self._known(kind, self.kept_from, self.closed))
        return known - self._facts[kind].seconds(self.kept_from, self.closed)

    def _pending(self, kind: DeviceUse) -> float:
        return self._facts[kind].seconds(self.closed, float("inf"))
