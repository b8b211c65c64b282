"""Ledgers with plain times, sources with a manual clock, and a trace's stretches."""

from __future__ import annotations

from pathlib import Path

from seamless_verl.resources.ledger.activity import Activity, ActivityReport, DeviceUse, UseSpan
from seamless_verl.resources.ledger.ledger import Ledger
from seamless_verl.tools.view.timeline import read_events


class Clock:
    """A clock that shows what it was set to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def span(kind: str, start: float, end: float, device: str = "d0", *, open: bool = False) -> UseSpan:
    return UseSpan(device, DeviceUse(kind), start, end, open)


def activity_report(*spans: UseSpan, until: float | None = None, source: str = "s") -> ActivityReport:
    return ActivityReport(source, max((s.end for s in spans), default=0.0) if until is None else until, spans)


def make_ledger(devices: int = 1, **settings: object) -> Ledger:
    return Ledger([f"d{n}" for n in range(devices)], 0.0, **settings)  # type: ignore[arg-type]


def make_activity(clock: Clock, *devices: str, source: str = "s", **settings: int) -> Activity:
    return Activity(source, devices or ("d0",), clock=clock, **settings)


def interval_count(ledger: Ledger) -> int:
    """Intervals and open spans in memory."""
    devices = ledger._devices.values()
    return sum(len(device._open) + sum(map(len, device._reported.values())) for device in devices)


def seconds(ledger: Ledger, device: str = "d0") -> dict[str, float]:
    """Seconds of the kinds that have any, by name."""
    return {str(kind): value for kind, value in ledger.seconds[device].items() if value}


def stretches(path: Path, process: int) -> list[tuple[int, str, float, float]]:
    """(lane, name, start, end) of the complete events of a process, times in seconds."""
    events = [e for e in read_events(path) if e["ph"] == "X" and e["pid"] == process]
    return [(e["tid"], e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events]
