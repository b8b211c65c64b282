"""Writes a run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing; tools/view/timeline.py reads it back.

Source of the format: "Trace Event Format", JSON array flavour, in which the closing bracket is optional. Each event is
one line, written whole: after a kill at any moment all lines but perhaps the last are whole.

Process 1 has a thread for each device; process 2 one for each device's corrections, which arrived late and name in
`was` what the stretch was counted as before; process 3 the steps and a counter, the idle share. A gap is idle time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seamless_verl.resources.ledger.activity import DeviceUse
from seamless_verl.resources.ledger.device import Change

if TYPE_CHECKING:
    from seamless_verl.resources.ledger.ledger import LedgerReport

DEVICES, LATE, STEPS = 1, 2, 3
END = "end"  # of the period after a run's last step, which is none itself
TITLES = {DEVICES: "devices", LATE: "devices: corrections that arrived late", STEPS: "steps and idle share"}
COLOURS = {  # names of the format's own palette
    DeviceUse.TRAIN: "thread_state_runnable",
    DeviceUse.ROLLOUT: "thread_state_running",
    DeviceUse.SWITCH: "thread_state_iowait",
    DeviceUse.SYNC: "terrible",
    DeviceUse.IDLE: "grey",
}
Event = Mapping[str, Any]


class Trace:
    """A new trace file, which the ledger writes; `started` is the ledger's.

    Any thread may write. Raises FileExistsError when the file exists: another run's trace is not overwritten.
    """

    def __init__(self, path: Path, devices: Sequence[str], started: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._started, self._lock = path, started, threading.Lock()
        self._lanes = {device: lane for lane, device in enumerate(devices)}
        self._pending: list[Event] = []
        with path.open("xb") as file:
            file.write(b"[\n")
        self._write([event for process in TITLES for event in self._titles(process)])

    def counted(self, device: str, kind: DeviceUse, start: float, end: float) -> None:
        if kind is not DeviceUse.IDLE:
            self._pending.append(self._stretch(DEVICES, self._lanes[device], kind, start, end, cname=COLOURS[kind]))

    def amended(self, device: str, change: Change) -> None:
        args = {"was": change.was}
        lane = self._lanes[device]
        self._pending.append(self._stretch(LATE, lane, change.kind, change.start, change.end, args=args))

    def closed(self, report: LedgerReport, label: str) -> None:
        """Writes the whole period with one system call, however many stretches it has."""
        seconds = {f"{kind} (s)": round(value, 3) for kind, value in report.totals.items()}
        name = label or f"until {report.until - self._started:.1f} s"
        step = self._stretch(STEPS, 0, name, report.start, report.until, args=seconds)
        pending, self._pending = self._pending, []
        self._write([*pending, step, self._idle_share(report)])

    def _titles(self, process: int) -> list[Event]:
        title = {"ph": "M", "pid": process, "name": "process_name", "args": {"name": TITLES[process]}}
        lanes = {"steps": 0} if process == STEPS else self._lanes
        names = [("thread_name", {"name": name}, lane) for name, lane in lanes.items()]
        order = [("thread_sort_index", {"sort_index": lane}, lane) for lane in lanes.values()]
        threads = [{"ph": "M", "pid": process, "tid": tid, "name": n, "args": args} for n, args, tid in names + order]
        return [title, *threads]

    def _stretch(self, process: int, lane: int, name: str, start: float, end: float, **more: Any) -> Event:
        at, until = self._us(start), self._us(end)
        return {"ph": "X", "pid": process, "tid": lane, "name": name, "ts": at, "dur": round(until - at, 3), **more}

    def _idle_share(self, report: LedgerReport) -> Event:
        """A counter, with its value from the period's start on."""
        args = {"idle": report.shares[DeviceUse.IDLE]}
        return {"ph": "C", "pid": STEPS, "tid": 0, "name": "idle share", "ts": self._us(report.start), "args": args}

    def _us(self, time: float) -> float:
        """Microseconds since the start, to the nanosecond: the format's unit."""
        return round((time - self._started) * 1e6, 3)

    def _write(self, events: Sequence[Event]) -> None:
        with self._lock, self.path.open("ab", buffering=0) as file:
            file.write(b"".join(map(_line, events)))


def _line(event: Event) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b",\n"
