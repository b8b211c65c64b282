"""The device-second ledger: every second of every device is exactly one of train, sync, switch, rollout, idle.

Invariants:
- train + sync + switch + rollout + idle = devices x (closed - started), per device and in total.
- The totals do not depend on the order in which reports arrive, while they are at most `keep_s` late.
- Nothing is counted for a lost source after its loss, until a report arrives that was made after it.
- Memory holds the open period and the last `keep_s` seconds before it, at most `max_intervals` of a kind and device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

from seamless_verl.resources.ledger.activity import BUSY, SAME_CLOCK, ActivityReport, ClockOffset, DeviceUse, UseSpan
from seamless_verl.resources.ledger.device import Change, DeviceLedger, HiddenSeconds, merge_by_kind
from seamless_verl.resources.ledger.report import PREFIX, LedgerReport, check_closed, shares, totals
from seamless_verl.resources.ledger.trace import Trace


class Ledger:
    """Device-seconds of a run from `started` on, a monotonic time; used by one thread. It writes its counts to `trace`.

    What a report says about time more than `keep_s` seconds before the last close is not counted, but named in
    `too_late`.
    """

    def __init__(
        self,
        devices: Sequence[str],
        started: float,
        *,
        keep_s: float = 600.0,
        max_intervals: int = 10_000,
        trace: Trace | None = None,
    ) -> None:
        if not devices or len(set(devices)) < len(devices):
            raise ValueError(f"devices={list(devices)!r}: name each device, once")
        if keep_s < 0 or max_intervals < 1:
            raise ValueError(f"keep_s={keep_s!r}, max_intervals={max_intervals!r}: give at least 0 seconds, 1 interval")
        self.started = self.closed = started
        self._devices = {name: DeviceLedger(name, started) for name in devices}
        self._keep_s, self._max_intervals, self._trace = keep_s, max_intervals, trace
        self._last_report_at: dict[str, float] = {}
        self._dropped = 0.0
        self.last_report: LedgerReport | None = None
        self._totals_before: tuple[HiddenSeconds, float, float] = ({}, 0.0, 0.0)

    def add(self, report: ActivityReport, clock: ClockOffset = SAME_CLOCK) -> None:
        """Enters a source's report, in any order and however late; `clock` is the source's against ours.

        Raises ValueError on an unknown device, a kind that is not reported, or a span that ends before it begins;
        nothing of the report is entered then.
        """
        report = report.on(clock)
        newest = report.until >= self._last_report_at.get(report.source, report.until)
        spans: dict[str, list[UseSpan]] = {device: [] for device in self._devices}
        for span in report.spans:
            self._check_span(report.source, span)
            spans[span.device].append(span)
        if newest:
            self._last_report_at[report.source] = report.until
        self._dropped += sum(report.dropped.values())
        for device, device_ledger in self._devices.items():
            self._trace_amended(device, device_ledger.add(report.source, spans[device], newest=newest))

    def source_lost(self, source: str, at: float | None = None) -> None:
        """The process of a source died at `at`, by the ledger's clock; None when that is not known.

        - Its open spans end at `at`, but not before its last report; with None they end at its last report. Time
          after that which was already counted for them is counted anew, as for a late report.
        - A report made before `at` that arrives later adds its spans, but opens none. A report made after `at`
          is that of a new process with the same source name. With None the next report is taken as that, whatever
          its time.
        - A second call for the same loss changes nothing, nor does one for a source without open spans. A call
          that wrongly ends the spans of a living process is undone by its next report, which covers them.

        Raises ValueError when `at` is no finite number.
        """
        if at is not None and not isfinite(at):
            raise ValueError(f"source {source!r}: at={at!r} is no time: give seconds by the ledger's clock, or None")
        if at is None:
            self._last_report_at.pop(source, None)
        else:
            self._last_report_at[source] = max(at, self._last_report_at.get(source, at))
        for device, device_ledger in self._devices.items():
            self._trace_amended(device, device_ledger.source_lost(source, at))

    def close(self, until: float, label: str = "") -> LedgerReport:
        """Counts up to `until` and reports the time since the last close; `label` is for the trace.

        Raises ValueError when `until` lies before it; IntegrityError, at the end, unless the period's kinds add up.
        """
        if not until >= self.closed:
            raise ValueError(f"until={until!r} lies before {self.closed!r}, up to where the ledger is closed already")
        start, self.closed = self.closed, until
        periods = {name: device_ledger.close(until) for name, device_ledger in self._devices.items()}
        seconds = {device: dict.fromkeys(DeviceUse, 0.0) for device in self._devices}
        for device, slices in periods.items():
            for kind, begin, end in merge_by_kind(slices):
                seconds[device][kind] += end - begin
                if self._trace is not None:
                    self._trace.counted(device, kind, begin, end)
        self.last_report = report = self._report(start, seconds)
        if self._trace is not None:
            self._trace.closed(report, label)
        for device_ledger in self._devices.values():
            device_ledger.finalize(until - self._keep_s, self._max_intervals)
        report.check_integrity()
        return report

    @property
    def seconds(self) -> dict[str, dict[DeviceUse, float]]:
        """By device and kind, from the start to the last close."""
        return {name: dict(device_ledger.seconds) for name, device_ledger in self._devices.items()}

    @property
    def hidden(self) -> HiddenSeconds:
        """(kind that counted, kind hidden under it): seconds since the start, over all devices."""
        pairs = [(over, under) for over in BUSY for under in BUSY if over is not under]
        return {pair: sum(ledger.hidden.get(pair, 0.0) for ledger in self._devices.values()) for pair in pairs}

    def metrics(self) -> dict[str, float]:
        """The last report's, and the shares of the run up to there; empty before the first."""
        if self.last_report is None:
            return {}
        run = {f"{PREFIX}/run/{kind}_share": share for kind, share in shares(totals(self.seconds)).items()}
        return self.last_report.metrics() | run

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the kinds add up within 1% of the wall time, per device and in total."""
        for device_ledger in self._devices.values():
            device_ledger.check_integrity()
        wall = len(self._devices) * (self.closed - self.started)
        check_closed("devices x wall time", wall, totals(self.seconds))

    def _report(self, start: float, seconds: Mapping[str, Mapping[DeviceUse, float]]) -> LedgerReport:
        amended = {name: device_ledger.pop_amended() for name, device_ledger in self._devices.items()}
        too_late = sum(sum(device_ledger.too_late.values()) for device_ledger in self._devices.values())
        now, (hidden, late, dropped) = self.hidden, self._totals_before
        self._totals_before = (now, too_late, self._dropped)
        since = {pair: seconds - hidden.get(pair, 0.0) for pair, seconds in now.items()}
        return LedgerReport(start, self.closed, seconds, amended, since, too_late - late, self._dropped - dropped)

    def _check_span(self, source: str, span: UseSpan) -> None:
        if span.device not in self._devices:
            names = sorted(self._devices)
            raise ValueError(f"source {source!r}: device={span.device!r} is not one of the ledger's: {names}")
        if span.kind not in BUSY or not float("-inf") < span.start <= span.end < float("inf"):
            raise ValueError(f"source {source!r}: {span!r} must be of {[*map(str, BUSY)]}, and start before it ends")

    def _trace_amended(self, device: str, changes: Iterable[Change]) -> None:
        if self._trace is not None:
            for change in changes:
                self._trace.amended(device, change)
