"""The device-second ledger: every second of every device is exactly one of train, sync, switch, rollout, idle.

Invariants:
- train + sync + switch + rollout + idle = devices x (closed - started), per device and in total.
- The totals do not depend on the order in which reports arrive, while they are at most `keep_s` late.
- Nothing is counted for a lost source after its loss, until a report arrives that was made after it.
- Memory holds the open period and the last `keep_s` seconds before it, at most `max_intervals` of a kind and device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from seamless_verl.resources.ledger.activity import BUSY, SAME_CLOCK, ActivityReport, ClockOffset, DeviceUse, UseSpan
from seamless_verl.resources.ledger.device import Change, DeviceLedger, HiddenSeconds, check_closed, merge_by_kind
from seamless_verl.resources.ledger.trace import Trace

PREFIX = "seamless/device"
Table = Mapping[str, Mapping[DeviceUse, float]]  # device: kind: seconds


@dataclass(frozen=True)
class LedgerReport:
    """Seconds in [start, until) on every device, as known when the period was closed.

    `amended` is how the seconds of earlier periods have changed since the previous report, because of late
    reports: it adds up to 0, and all reports' `seconds` and `amended` together are the ledger's totals.
    `hidden` counts a kind under another that took precedence, in this period or in amended ones. `too_late` is
    what arrived after its time had become final, and `dropped` what a source could not keep: neither is in any
    other number.
    """

    start: float
    until: float
    seconds: Table
    amended: Table
    hidden: Mapping[tuple[DeviceUse, DeviceUse], float]
    too_late: float = 0.0
    dropped: float = 0.0

    @property
    def wall(self) -> float:
        return self.until - self.start

    @property
    def totals(self) -> dict[DeviceUse, float]:
        """Seconds by kind over all devices."""
        return totals(self.seconds)

    @property
    def shares(self) -> dict[DeviceUse, float]:
        """Of devices x wall time, 0 to 1; 0 for an empty period."""
        return shares(self.totals)

    def metrics(self) -> dict[str, float]:
        """The period for verl's loggers: shares 0 to 1, `_s` in device-seconds."""
        metrics = {f"{PREFIX}/{kind}_share": share for kind, share in self.shares.items()}
        metrics |= {f"{PREFIX}/{kind}_s": seconds for kind, seconds in self.totals.items()}
        pairs = [(over, under) for over in BUSY for under in BUSY if BUSY.index(over) < BUSY.index(under)]
        metrics |= {f"{PREFIX}/overlap/{u}_under_{o}_s": self.hidden.get((o, u), 0.0) for o, u in pairs}
        metrics[f"{PREFIX}/overlap_s"] = sum(self.hidden.values())
        metrics[f"{PREFIX}/amended_s"] = sum(abs(s) for kinds in self.amended.values() for s in kinds.values()) / 2
        metrics |= {f"{PREFIX}/too_late_s": self.too_late, f"{PREFIX}/dropped_s": self.dropped}
        for device, kinds in self.seconds.items():
            metrics |= {f"{PREFIX}/{device}/{kind}_share": share for kind, share in shares(kinds).items()}
        return metrics

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the kinds add up to devices x wall time within 1%."""
        check_closed("devices x wall time", self.wall * len(self.seconds), self.totals)


def totals(table: Table) -> dict[DeviceUse, float]:
    return {kind: sum(kinds[kind] for kinds in table.values()) for kind in DeviceUse}


def shares(seconds: Mapping[DeviceUse, float]) -> dict[DeviceUse, float]:
    whole = sum(seconds.values())
    return {kind: seconds[kind] / whole if whole else 0.0 for kind in DeviceUse}


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
        assert devices and len(set(devices)) == len(devices), devices
        self.started = self.closed = started
        self._devices = {name: DeviceLedger(name, started) for name in devices}
        self._keep_s, self._max_intervals, self._trace = keep_s, max_intervals, trace
        self._last_report_at: dict[str, float] = {}
        self._dropped = 0.0
        self.last_report: LedgerReport | None = None
        self._totals_before: tuple[HiddenSeconds, float, float] = ({}, 0.0, 0.0)

    def add(self, report: ActivityReport, clock: ClockOffset = SAME_CLOCK) -> None:
        """Enters a source's report, in any order and however late; `clock` is the source's against ours."""
        report = report.on(clock)
        newest = report.until >= self._last_report_at.get(report.source, report.until)
        spans: dict[str, list[UseSpan]] = {device: [] for device in self._devices}
        for span in report.spans:
            spans[span.device].append(span)
        if newest:
            self._last_report_at[report.source] = report.until
        self._dropped += sum(report.dropped.values())
        for device, device_ledger in self._devices.items():
            self._trace_amended(device, device_ledger.add(report.source, spans[device], newest=newest))

    def source_lost(self, source: str) -> None:
        """The process of a source died, or does not reply: its open spans end at its last report.

        Time after that which was already counted for them is counted anew, as for a late report. The next report is
        taken as that of a new process, whatever its time; one of a living process covers the spans that were ended.
        """
        self._last_report_at.pop(source, None)
        for device, device_ledger in self._devices.items():
            self._trace_amended(device, device_ledger.source_lost(source))

    def close(self, until: float, label: str = "") -> LedgerReport:
        """Counts up to `until` and reports the time since the last close; `label` is for the trace.

        Raises IntegrityError, at the end, unless the period's kinds add up.
        """
        assert until >= self.closed, "the ledger is closed up to there already"
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

    def _trace_amended(self, device: str, changes: Iterable[Change]) -> None:
        if self._trace is not None:
            for change in changes:
                self._trace.amended(device, change)
