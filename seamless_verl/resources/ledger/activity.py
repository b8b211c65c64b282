"""The offset between two hosts' monotonic clocks, from round trips.

Cristian, "Probabilistic clock synchronization" (1989): the other clock was read at some moment between
sending and receiving; taking the middle, the error is at most half the round trip. The quickest trip of
several bounds it best. Afterwards two quartz clocks part by at most `DRIFT` seconds a second.

What a device can be doing, and how a source says that it did. Times are monotonic seconds.

What a process does on its devices, noted as it does it.

Invariants:
- A (device, kind) is active while its count is above zero.
- Takes do not overlap and leave no gap: what is active at a take is cut there, and goes on in the next.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

DRIFT = 100e-6  # two clocks, each within the usual 50 parts in a million


@dataclass(frozen=True)
class ClockOffset:
    """The other clock minus ours is `offset` +- `error` seconds, as of `at` on ours."""

    offset: float
    error: float
    at: float

    @classmethod
    def of_round_trip(cls, sent: float, theirs: float, received: float) -> ClockOffset:
        """`sent` and `received` by our clock, `theirs` what the other read in between."""
        if received < sent:
            raise ValueError(f"received={received!r} lies before sent={sent!r}: give both by the same monotonic clock")
        return cls(theirs - (sent + received) / 2, (received - sent) / 2, received)

    @classmethod
    def measure(
        cls, ask: Callable[[], float], *, trips: int = 5, clock: Callable[[], float] = time.monotonic
    ) -> ClockOffset:
        """The best of several round trips; `ask` returns the other clock's time."""
        if trips < 1:
            raise ValueError(f"trips={trips!r}: the offset comes from at least one round trip")
        return min((cls._trip(ask, clock) for _ in range(trips)), key=lambda found: found.error)

    @classmethod
    def _trip(cls, ask: Callable[[], float], clock: Callable[[], float]) -> ClockOffset:
        sent = clock()
        theirs = ask()
        return cls.of_round_trip(sent, theirs, clock())

    def here(self, theirs: float) -> float:
        """A time of the other clock, by ours."""
        return theirs - self.offset

    def error_at(self, now: float) -> float:
        """The bound on the error at `now`, in seconds: it grows while the clocks drift."""
        return self.error + abs(now - self.at) * DRIFT

    def better(self, other: ClockOffset, now: float) -> ClockOffset:
        """Whichever of the two is bounded more tightly now."""
        return self if self.error_at(now) <= other.error_at(now) else other


SAME_CLOCK = ClockOffset(0.0, 0.0, 0.0)  # processes of one host read one monotonic clock


class DeviceUse(StrEnum):
    """What a device-second was spent on. Where several are reported at once, the first of these counts.

    The order is from the most direct measurement to the least: a computation that ran on the device; its
    weights being written; a hand-over somebody waits for, of which a sync may be a part; requests that were
    in the engine, which says that there was work but not that any was done.
    """

    TRAIN = "train"
    """a computation of the trainer's worker ran on it"""
    SYNC = "sync"
    """its replica's weights were being replaced"""
    SWITCH = "switch"
    """it was being paused, handed over or brought back: from the order until it was done"""
    ROLLOUT = "rollout"
    """its engine had at least one running request and was not paused"""
    IDLE = "idle"
    """none of these"""


BUSY: tuple[DeviceUse, ...] = tuple(
    kind for kind in DeviceUse if kind is not DeviceUse.IDLE
)  # what sources report; idle is what remains
RANK = {kind: rank for rank, kind in enumerate(DeviceUse)}


class UseSpan(NamedTuple):
    """A device did something in [start, end); an open one still does at `end`, the moment it was reported."""

    device: str
    kind: DeviceUse
    start: float
    end: float
    open: bool = False


@dataclass(frozen=True)
class ActivityReport:
    """What a source did up to `until` since it was last asked; spans that were open then begin anew here.

    `dropped` are the seconds by kind that it could not keep until it was asked.
    """

    source: str
    until: float
    spans: tuple[UseSpan, ...] = ()
    dropped: Mapping[DeviceUse, float] = field(default_factory=dict)

    def on(self, clock: ClockOffset = SAME_CLOCK) -> ActivityReport:
        """The same by the clock of the ledger; `clock` is that of the source."""
        here = clock.here
        spans = tuple(span._replace(start=here(span.start), end=here(span.end)) for span in self.spans)
        return ActivityReport(self.source, here(self.until), spans, self.dropped)


Key = tuple[str, DeviceUse]


class Activity:
    """The notes of one source; any thread may write them, and another may take them.

    Methods speak of all the source's devices unless `devices` names some. `limit` bounds the finished spans
    kept between takes: beyond it the older half is dropped, and its seconds are reported as dropped.
    """

    def __init__(
        self, source: str, devices: Sequence[str], *, limit: int = 100_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not devices or limit < 2:
            raise ValueError(f"source {source!r}: devices={devices!r}, limit={limit!r}: give a device, a limit above 1")
        self.source, self.devices = source, tuple(dict.fromkeys(devices))
        self._limit, self._clock, self._lock = limit, clock, threading.Lock()
        self._all = {kind: [(device, kind) for device in self.devices] for kind in BUSY}
        self._counts: Counter[Key] = Counter()
        self._since: dict[Key, float] = {}
        self._finished: list[UseSpan] = []
        self._dropped: dict[DeviceUse, float] = {}

    @contextmanager
    def doing(self, kind: DeviceUse | str, devices: Iterable[str] | None = None) -> Iterator[None]:
        """A block during which the devices do this; blocks may nest and run in several threads."""
        keys = self._keys(kind, devices)
        self._add(keys, 1)
        try:
            yield
        finally:
            self._add(keys, -1)

    def begin(self, kind: DeviceUse | str, devices: Iterable[str] | None = None) -> None:
        """One more, as of running requests: active while the count is above zero."""
        self._add(self._keys(kind, devices), 1)

    def end(self, kind: DeviceUse | str, devices: Iterable[str] | None = None) -> None:
        """One fewer; raises ValueError when there was none."""
        self._add(self._keys(kind, devices), -1)

    def take(self) -> ActivityReport:
        """What was done since the last take; safe to send to another process."""
        with self._lock:
            now = self._clock()
            opened = [UseSpan(device, kind, since, now, True) for (device, kind), since in self._since.items()]
            spans, dropped = (*self._finished, *opened), self._dropped
            self._since = dict.fromkeys(self._since, now)
            self._finished, self._dropped = [], {}
        return ActivityReport(self.source, now, spans, dropped)

    def _keys(self, kind: DeviceUse | str, devices: Iterable[str] | None) -> list[Key]:
        keys = self._all.get(DeviceUse(kind))
        if keys is None:
            raise ValueError(
                f"source {self.source!r}: kind={kind!r} is what remains; report one of {[*map(str, BUSY)]}"
            )
        if devices is None:
            return keys
        chosen = tuple(dict.fromkeys(devices))
        if not set(chosen) <= set(self.devices):
            raise ValueError(f"source {self.source!r}: devices={chosen!r} are not all among its own, {self.devices!r}")
        return [(device, DeviceUse(kind)) for device in chosen]

    def _add(self, keys: list[Key], step: int) -> None:
        with self._lock:
            for device, kind in keys:
                if self._counts[device, kind] + step < 0:
                    raise ValueError(f"source {self.source!r}: {kind} of {device!r} ends, but it had not begun")
            for key in keys:
                self._counts[key] += step
            self._note(keys)

    def _note(self, keys: list[Key]) -> None:
        """Begins or ends a span where the state changed; the lock is held, so that clock readings are in order."""
        now = self._clock()
        for key in keys:
            active = self._counts[key] > 0
            if active and key not in self._since:
                self._since[key] = now
            elif not active and key in self._since:
                self._finish(UseSpan(*key, self._since.pop(key), now))

    def _finish(self, span: UseSpan) -> None:
        self._finished.append(span)
        if len(self._finished) > self._limit:
            half = len(self._finished) // 2
            for old in self._finished[:half]:
                self._dropped[old.kind] = self._dropped.get(old.kind, 0.0) + old.end - old.start
            del self._finished[:half]


@dataclass(frozen=True)
class NodeActivity:
    """A process's report, and the Ray node whose clock it read."""

    report: ActivityReport
    node: str
