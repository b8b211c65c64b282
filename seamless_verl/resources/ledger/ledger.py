"""The device-second ledger: every second of every device is exactly one of train, sync, switch, rollout, idle.

Invariants:
- train + sync + switch + rollout + idle = devices x (closed - started), per device and in total.
- The totals do not depend on the order in which sources are heard, while they are at most `keep_s` late.
- Memory holds the open period and the last `keep_s` seconds before it, at most `most` intervals of a kind and device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from seamless_verl.resources.ledger.activity import BUSY, SAME_CLOCK, ActivityReport, ClockOffset, DeviceUse, UseSpan
from seamless_verl.resources.ledger.device import DeviceLedger, Hidden
from seamless_verl.resources.ledger.interval_set import Change, by_kind
from seamless_verl.resources.ledger.report import PREFIX, LedgerReport, check_closed, shares, totals


class Follower(Protocol):
    """What wants to see the books as they are kept; a `Trace` is one."""

    def spent(self, device: str, kind: DeviceUse, start: float, end: float) -> None:
        """A stretch was counted; those of a device follow each other without gap, idle ones included."""

    def amended(self, device: str, change: Change) -> None:
        """A stretch already shown as `spent` counts differently now."""

    def closed(self, report: LedgerReport, label: str) -> None:
        """A period's report."""


class Ledger:
    """The books of a run's devices from `started` on, a monotonic time; one thread keeps them.

    A report that is more than `keep_s` seconds late is no longer counted, but named in `too_late`.
    """

    def __init__(
        self,
        devices: Sequence[str],
        started: float,
        *,
        keep_s: float = 600.0,
        most: int = 10_000,
        followers: Iterable[Follower] = (),
    ) -> None:
        if not devices or len(set(devices)) < len(devices):
            raise ValueError(f"devices={list(devices)!r}: name each device, once")
        if keep_s < 0 or most < 1:
            raise ValueError(f"keep_s={keep_s!r}, most={most!r}: give at least 0 seconds and 1 interval")
        self.started = self.closed = started
        self._books = {name: DeviceLedger(name, started) for name in devices}
        self._keep_s, self._most, self._followers = keep_s, most, tuple(followers)
        self._heard: dict[str, float] = {}
        self._dropped = 0.0
        self._last: LedgerReport | None = None
        self._before: tuple[Hidden, float, float] = ({}, 0.0, 0.0)

    def add(self, taken: ActivityReport, clock: ClockOffset = SAME_CLOCK) -> None:
        """Enters what a source took, in any order and however late; `clock` is the source's against ours.

        Raises ValueError on a device that is not in the books, a kind that is not reported, or a span that ends
        before it begins; nothing of it is entered then.
        """
        taken = taken.on(clock)
        newest = taken.until >= self._heard.get(taken.source, taken.until)
        spans: dict[str, list[UseSpan]] = {device: [] for device in self._books}
        for span in taken.spans:
            self._refuse_unless_sound(taken.source, span)
            spans[span.device].append(span)
        if newest:
            self._heard[taken.source] = taken.until
        self._dropped += sum(taken.dropped.values())
        for device, book in self._books.items():
            self._show(device, book.take(taken.source, spans[device], newest=newest))

    def lost(self, source: str) -> None:
        """The source is gone: what it was doing ended when it was last heard of."""
        self._heard.pop(source, None)
        for device, book in self._books.items():
            self._show(device, book.lost(source))

    def close(self, until: float, label: str = "") -> LedgerReport:
        """Counts up to `until` and reports the time since the last close; `label` is for the followers.

        Raises ValueError when `until` lies before it.
        """
        if not until >= self.closed:
            raise ValueError(f"until={until!r} lies before {self.closed!r}, up to where the books are closed already")
        start, self.closed = self.closed, until
        periods = {device: book.close(until) for device, book in self._books.items()}
        seconds = {device: dict.fromkeys(DeviceUse, 0.0) for device in self._books}
        for device, segments in periods.items():
            for kind, begin, end in by_kind(segments):
                seconds[device][kind] += end - begin
                for follower in self._followers:
                    follower.spent(device, kind, begin, end)
        self._last = report = self._report(start, seconds)
        for follower in self._followers:
            follower.closed(report, label)
        for book in self._books.values():
            book.settle(until - self._keep_s, self._most)
        return report

    @property
    def seconds(self) -> dict[str, dict[DeviceUse, float]]:
        """By device and kind, from the start to the last close."""
        return {device: dict(book.seconds) for device, book in self._books.items()}

    @property
    def hidden(self) -> Hidden:
        """(kind that counted, kind hidden under it): seconds since the start, over all devices."""
        pairs = [(over, under) for over in BUSY for under in BUSY if over is not under]
        return {pair: sum(book.hidden.get(pair, 0.0) for book in self._books.values()) for pair in pairs}

    @property
    def held(self) -> int:
        """How many intervals are in memory."""
        return sum(book.held for book in self._books.values())

    def metrics(self, *, per_device: bool = True) -> dict[str, float]:
        """The last report's, and the shares of the run up to there; empty before the first."""
        if self._last is None:
            return {}
        run = {f"{PREFIX}/run/{kind}_share": share for kind, share in shares(totals(self.seconds)).items()}
        return self._last.metrics(per_device=per_device) | run

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the books close within 1% of the wall time, per device and in total."""
        for book in self._books.values():
            book.check_integrity()
        wall = len(self._books) * (self.closed - self.started)
        check_closed("devices x wall time", wall, totals(self.seconds))

    def _report(self, start: float, seconds: Mapping[str, Mapping[DeviceUse, float]]) -> LedgerReport:
        amended = {device: book.take_amended() for device, book in self._books.items()}
        too_late = sum(sum(book.too_late.values()) for book in self._books.values())
        now, (hidden, late, dropped) = self.hidden, self._before
        self._before = (now, too_late, self._dropped)
        since = {pair: seconds - hidden.get(pair, 0.0) for pair, seconds in now.items()}
        return LedgerReport(start, self.closed, seconds, amended, since, too_late - late, self._dropped - dropped)

    def _refuse_unless_sound(self, source: str, span: UseSpan) -> None:
        if span.device not in self._books:
            raise ValueError(f"source {source!r}: device={span.device!r} is not in the books: {sorted(self._books)}")
        if span.kind not in BUSY or not float("-inf") < span.start <= span.end < float("inf"):
            raise ValueError(f"source {source!r}: {span!r} must be of {[*map(str, BUSY)]}, and start before it ends")

    def _show(self, device: str, changes: Iterable[Change]) -> None:
        for follower in self._followers:
            for change in changes:
                follower.amended(device, change)
