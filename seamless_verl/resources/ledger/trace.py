"""The run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, written as it goes.

Source of the format: "Trace Event Format", JSON array flavour, in which the closing bracket is optional.
One event a line, in one write: after a kill at any moment all lines but perhaps the last are whole.

Lanes: process 1 has a thread for each device; process 2 one for each device's corrections, which arrived late
and say what a stretch `was`; process 3 has the steps. Counters are in process 3. A gap on a device is idle time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seamless_verl.resources.ledger.cover import Change
from seamless_verl.resources.ledger.report import Report
from seamless_verl.resources.ledger.spans import Kind

DEVICES, LATE, STEPS = 1, 2, 3
TITLES = {DEVICES: "devices", LATE: "devices: corrections that arrived late", STEPS: "steps and counters"}
COLOURS = {  # names of the format's own palette
    Kind.TRAIN: "thread_state_runnable",
    Kind.ROLLOUT: "thread_state_running",
    Kind.SWITCH: "thread_state_iowait",
    Kind.SYNC: "terrible",
    Kind.IDLE: "grey",
}
STRETCHES = tuple(b'{"ph":"X","pid":%d,' % process for process in (DEVICES, LATE))  # how their lines begin
Event = Mapping[str, Any]


class Trace:
    """A new trace file, to be given to the ledger as a follower; `started` is the ledger's.

    Any thread may write. Raises FileExistsError when the file is there already: another run's is not overwritten.
    """

    def __init__(self, path: Path, devices: Sequence[str], started: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._started, self._lock = path, started, threading.Lock()
        self._lanes = {device: lane for lane, device in enumerate(devices)}
        self._file = path.open("xb", buffering=0)
        self._waiting: list[Event] = []
        self._file.write(b"[\n")
        self._write([event for process in TITLES for event in self._titles(process)])

    def spent(self, device: str, kind: Kind, start: float, end: float) -> None:
        if kind is not Kind.IDLE:
            self._waiting.append(self._stretch(DEVICES, self._lanes[device], kind, start, end, cname=COLOURS[kind]))

    def amended(self, device: str, change: Change) -> None:
        args = {"was": change.was}
        lane = self._lanes[device]
        self._waiting.append(self._stretch(LATE, lane, change.kind, change.start, change.end, args=args))

    def closed(self, report: Report, label: str) -> None:
        """A period is written in one go: one system call a step, however many stretches it has."""
        seconds = {f"{kind} (s)": round(value, 3) for kind, value in report.totals.items()}
        name = label or f"until {report.until - self._started:.1f} s"
        step = self._stretch(STEPS, 0, name, report.start, report.until, args=seconds)
        waiting, self._waiting = self._waiting, []
        self._write([*waiting, step, self._count("idle share", report.start, {"idle": report.shares[Kind.IDLE]})])

    def counter(self, name: str, at: float, values: float | Mapping[str, float]) -> None:
        """The value of a counter from `at` on, as of running calls; several values of one counter are stacked."""
        self._write([self._count(name, at, values if isinstance(values, Mapping) else {name: values})])

    def close(self) -> None:
        """Writes the closing bracket, after which the file is JSON to any reader; once closed it stays so."""
        with self._lock:
            if not self._file.closed:
                self._file.write(_line({"ph": "M", "pid": STEPS, "name": "closed", "args": {}})[:-2] + b"\n]\n")
                self._file.close()

    def _titles(self, process: int) -> list[Event]:
        named = {"ph": "M", "pid": process, "name": "process_name", "args": {"name": TITLES[process]}}
        lanes = {"steps": 0} if process == STEPS else self._lanes
        names = [("thread_name", {"name": name}, lane) for name, lane in lanes.items()]
        order = [("thread_sort_index", {"sort_index": lane}, lane) for lane in lanes.values()]
        threads = [{"ph": "M", "pid": process, "tid": tid, "name": n, "args": args} for n, args, tid in names + order]
        return [named, *threads]

    def _stretch(self, process: int, lane: int, name: str, start: float, end: float, **more: Any) -> Event:
        at, last = self._us(start), self._us(end)
        return {"ph": "X", "pid": process, "tid": lane, "name": name, "ts": at, "dur": round(last - at, 3), **more}

    def _count(self, name: str, at: float, values: Mapping[str, float]) -> Event:
        return {"ph": "C", "pid": STEPS, "tid": 0, "name": name, "ts": self._us(at), "args": dict(values)}

    def _us(self, time: float) -> float:
        """Microseconds since the start, to the nanosecond: the format's unit."""
        return round((time - self._started) * 1e6, 3)

    def _write(self, events: Sequence[Event]) -> None:
        with self._lock:
            self._file.write(b"".join(map(_line, events)))


def _line(event: Event) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b",\n"
