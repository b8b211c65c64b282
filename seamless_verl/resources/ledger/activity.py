"""Records what a process does on its devices, as spans of monotonic time, and reports it to the ledger.

Invariants:
- A (device, kind) is active while its count is above zero.
- Reports of a source do not overlap and leave no gap: a span that is active when a report is taken is cut there.

Source of the clocks' offset: Cristian, "Probabilistic clock synchronization" (1989). The other clock was read at some
moment between sending and receiving. With the middle of the two, the error is at most half the round trip, so that the
quickest of several trips bounds it best. Afterwards the clocks drift apart by at most `DRIFT` seconds a second.
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
    """The remote clock minus ours is `offset` +- `error` seconds, as of `at` on ours."""

    offset: float
    error: float
    at: float

    @classmethod
    def of_round_trip(cls, sent: float, remote: float, received: float) -> ClockOffset:
        """`sent` and `received` are by our clock, `remote` is what the remote clock read in between."""
        assert sent <= received, "both are of one monotonic clock"
        return cls(remote - (sent + received) / 2, (received - sent) / 2, received)

    def error_at(self, now: float) -> float:
        """The bound on the error at `now`, in seconds."""
        return self.error + abs(now - self.at) * DRIFT

    def better(self, other: ClockOffset, now: float) -> ClockOffset:
        """The one of the two whose error is smaller now."""
        return self if self.error_at(now) <= other.error_at(now) else other


SAME_CLOCK = ClockOffset(0.0, 0.0, 0.0)  # processes of one host read one monotonic clock


class DeviceUse(StrEnum):
    """What a device-second was spent on. Where several kinds are reported at once, the first in this order counts.

    The order is from the most direct measurement to the least: a computation that ran on the device; a load of
    weights; a switch that training or generation waits for, of which a sync may be a part; requests in the engine,
    which show that there was work, but not that any was done.
    """

    TRAIN = "train"
    """a computation of the trainer's worker ran on it"""
    SYNC = "sync"
    """its replica's weights were being replaced"""
    SWITCH = "switch"
    """it was being lent or reclaimed: from the command until that was done"""
    ROLLOUT = "rollout"
    """its engine had at least one running request and was not paused"""
    IDLE = "idle"
    """none of these"""


BUSY: tuple[DeviceUse, ...] = tuple(kind for kind in DeviceUse if kind is not DeviceUse.IDLE)
"""What sources report; idle is what remains."""
RANK = {kind: rank for rank, kind in enumerate(DeviceUse)}


class UseSpan(NamedTuple):
    """A device's use in [start, end); an open span had not ended when it was reported, at `end`."""

    device: str
    kind: DeviceUse
    start: float
    end: float
    open: bool = False


@dataclass(frozen=True)
class ActivityReport:
    """What a source did from its previous report up to `until`; spans that were open then begin anew here.

    `dropped` are the seconds by kind that the source could not keep until the report was taken.
    """

    source: str
    until: float
    spans: tuple[UseSpan, ...] = ()
    dropped: Mapping[DeviceUse, float] = field(default_factory=dict)

    def on(self, clock: ClockOffset = SAME_CLOCK) -> ActivityReport:
        """The same report by the ledger's clock; `clock` is the source's against it."""
        ahead = clock.offset
        spans = tuple(span._replace(start=span.start - ahead, end=span.end - ahead) for span in self.spans)
        return ActivityReport(self.source, self.until - ahead, spans, self.dropped)


Key = tuple[str, DeviceUse]


class Activity:
    """Records what one source does, on all its devices or on some; any thread may record, and any may take the report.

    `limit` bounds the finished spans kept between two reports: beyond it the older half is dropped, and its seconds are
    reported as dropped.
    """

    def __init__(
        self, source: str, devices: Sequence[str], *, limit: int = 100_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert devices, source
        self.source, self.devices = source, tuple(dict.fromkeys(devices))
        self._limit, self._clock, self._lock = limit, clock, threading.Lock()
        self._counts: Counter[Key] = Counter()
        self._since: dict[Key, float] = {}
        self._finished: list[UseSpan] = []
        self._dropped: dict[DeviceUse, float] = {}

    @contextmanager
    def doing(self, kind: DeviceUse | str, devices: Iterable[str] | None = None) -> Iterator[None]:
        """Records this kind for the block; blocks may nest and run in several threads."""
        self.begin(kind, devices)
        try:
            yield
        finally:
            self.end(kind, devices)

    def begin(self, kind: DeviceUse | str, devices: Iterable[str] | None = None) -> None:
        """Counts one more, such as a running request; the kind is active while the count is above zero."""
        self._add(DeviceUse(kind), devices, 1)

    def end(self, kind: DeviceUse | str, devices: Iterable[str] | None = None) -> None:
        self._add(DeviceUse(kind), devices, -1)

    def take(self) -> ActivityReport:
        """The report of what was done since the last one; it can be pickled."""
        with self._lock:
            now = self._clock()
            open_spans = [UseSpan(device, kind, since, now, True) for (device, kind), since in self._since.items()]
            spans, dropped = (*self._finished, *open_spans), self._dropped
            self._since = dict.fromkeys(self._since, now)
            self._finished, self._dropped = [], {}
        return ActivityReport(self.source, now, spans, dropped)

    def _add(self, kind: DeviceUse, devices: Iterable[str] | None, step: int) -> None:
        """Begins or ends a span where the state changes; clock readings are in order, since the lock is held."""
        chosen = self.devices if devices is None else tuple(dict.fromkeys(devices))
        assert kind in BUSY and set(chosen) <= set(self.devices), (self.source, kind, chosen)
        with self._lock:
            assert all(self._counts[device, kind] + step >= 0 for device in chosen), f"{kind} ends, but had not begun"
            now = self._clock()
            for device in chosen:
                key = device, kind
                self._counts[key] += step
                if self._counts[key] > 0:
                    self._since.setdefault(key, now)
                else:
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
    """The report of a process, and the id of the Ray node whose clock it read.

    `nvml_busy`: of each of its devices, the share of time in which the driver saw it compute; empty if not measured.
    `sent` is when it was asked for, by the ledger's clock, where that was earlier than for the reports it came with.
    """

    report: ActivityReport
    node: str
    nvml_busy: tuple[float, ...] = ()
    sent: float | None = None
