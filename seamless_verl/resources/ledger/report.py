"""The ledger's report of one period: device-seconds by kind, shares and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seamless_verl.errors import IntegrityError
from seamless_verl.resources.ledger.activity import BUSY, DeviceUse

PREFIX = "seamless/device"
TOLERANCE = 0.01  # of the wall time
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


def check_closed(what: str, expected: float, seconds: Mapping[DeviceUse, float]) -> None:
    """Raises IntegrityError unless the seconds by kind add up to `expected`, within 1% and a microsecond."""
    found = sum(seconds.values())
    if abs(expected - found) > TOLERANCE * expected + 1e-6:
        law = f"{what} against train + rollout + switch + sync + idle, in ms"
        raise IntegrityError(law, milliseconds(expected), milliseconds(found))


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
