"""Reads the trace of a run back as a timeline, and as lanes for the page: how each device spent each column of time.

A correction is added under its kind and subtracted from the kind in `was`, so corrections need no order, and a trace of
any length is read in the memory of its grid.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seamless_verl.resources.ledger.activity import DeviceUse
from seamless_verl.resources.ledger.trace import DEVICES, END, LATE, STEPS

STRETCH_PREFIXES = tuple(b'{"ph":"X","pid":%d,' % process for process in (DEVICES, LATE))  # of their lines
MAX_LANES = 64
WHOLE = 1000  # of a share
COLUMN_OF = {kind: index for index, kind in enumerate(DeviceUse)}


@dataclass(frozen=True)
class Timeline:
    """`grid` is seconds, float64 of shape [devices, columns, kinds]; times are seconds since the run's start."""

    devices: tuple[str, ...]
    start: float
    until: float
    grid: NDArray[np.float64]
    steps: tuple[tuple[str, float], ...]
    """(label, end) of each step that ends in the window"""

    @property
    def shares(self) -> NDArray[np.float64]:
        """Of each column, 0 to 1, same shape as the grid."""
        return self.grid / max((self.until - self.start) / self.grid.shape[1], 1e-12)


def read_events(path: Path, *, skipping: tuple[bytes, ...] = ()) -> Iterator[dict[str, Any]]:
    """The events of a trace, closed or not; a torn last line and lines that begin with one of `skipping` are left out.

    Raises ValueError, with the line's number, on a line that is not an event of ours.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.strip().removesuffix(b",")
            if not line.endswith(b"\n") or text in (b"[", b"]", b"") or text.startswith(skipping):
                continue
            try:
                event = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{path}:{number} is not an event of a trace that this package wrote") from error
            yield event


def read_timeline(path: Path, *, columns: int = 1200, last_s: float | None = None) -> Timeline:
    """The trace, or its last `last_s` seconds, in `columns` columns.

    Raises ValueError when no step had ended: then no time is counted.
    """
    if columns < 1 or (last_s is not None and last_s <= 0):
        raise ValueError(
            f"columns={columns!r}, last_s={last_s!r}: give at least one column, and a time above 0 or None"
        )
    devices, steps = _read_devices_and_steps(path)
    if not steps or steps[-1][1] <= 0:
        raise ValueError(f"{path}: the run ended before its first step did, so no time is counted in it")
    until = steps[-1][1]
    start = 0.0 if last_s is None else max(0.0, until - last_s)
    cells, width = Cells(len(devices), columns), (until - start) / columns
    for event in read_events(path):
        if event["ph"] == "X" and event["pid"] in (DEVICES, LATE):
            low = (event["ts"] / 1e6 - start) / width
            high = low + event["dur"] / 1e6 / width
            was = DeviceUse(event["args"]["was"]) if event["pid"] == LATE else DeviceUse.IDLE
            cells.add(event["tid"], DeviceUse(event["name"]), low, high, 1.0)
            cells.add(event["tid"], was, low, high, -1.0)
    grid = cells.filled()
    grid[:, :, COLUMN_OF[DeviceUse.IDLE]] += 1.0
    shown = tuple((label, end) for label, end in steps if end > start)
    return Timeline(devices, start, until, grid.clip(0.0, 1.0) * width, shown)


class Cells:
    """How much of each cell of [lanes, columns, kinds] is covered; the ends of stretches are added in batches.

    An end at position p of a lane covers its own column from p on and all columns after it. A stretch is what its
    start covers less what its end covers.
    """

    BATCH = 1 << 16

    def __init__(self, lanes: int, columns: int) -> None:
        self.columns = columns
        self._own = np.zeros((lanes, columns + 1, len(COLUMN_OF)))
        self._after = np.zeros((lanes, columns + 2, len(COLUMN_OF)))
        self._ends: list[tuple[int, int, float, float]] = []

    def add(self, lane: int, kind: DeviceUse, low: float, high: float, weight: float) -> None:
        """Adds a stretch; `low` and `high` are in columns."""
        low, high = (min(max(at, 0.0), self.columns) for at in (low, high))
        if low < high:
            self._ends += [(lane, COLUMN_OF[kind], low, weight), (lane, COLUMN_OF[kind], high, -weight)]
        if len(self._ends) > self.BATCH:
            self._flush()

    def filled(self) -> NDArray[np.float64]:
        self._flush()
        return np.asarray((self._own + self._after.cumsum(axis=1)[:, :-1])[:, :-1])

    def _flush(self) -> None:
        if not self._ends:
            return
        lane, kind, at, weight = np.array(self._ends).T
        lanes, kinds, column = lane.astype(int), kind.astype(int), at.astype(int)
        np.add.at(self._own, (lanes, column, kinds), weight * (column + 1 - at))
        np.add.at(self._after, (lanes, column + 1, kinds), weight)
        self._ends = []


def _read_devices_and_steps(path: Path) -> tuple[tuple[str, ...], list[tuple[str, float]]]:
    """Device names in the order of lanes, and (label, end in seconds) of each step."""
    devices: dict[int, str] = {}
    steps = []
    for event in read_events(path, skipping=STRETCH_PREFIXES):
        if event["pid"] == DEVICES and event["name"] == "thread_name":
            devices[event["tid"]] = event["args"]["name"]
        elif event["pid"] == STEPS and event["ph"] == "X":
            steps.append((event["name"], (event["ts"] + event["dur"]) / 1e6))
    return tuple(devices[lane] for lane in sorted(devices)), steps


def read_lanes(trace: Path, *, columns: int, last_s: float | None = None) -> dict[str, Any] | None:
    """What each device did over time, or in the last `last_s` seconds; None before the first step, or of another
    program's trace.

    `shares` has for each lane, column after column, the share of each of `kinds` in thousandths. `totals` are shares of
    the whole window, 0 to 1. `steps` are (label, end) in seconds since the run's start; what came after the last one is
    no step. More devices than fit are shown as groups of neighbours, averaged.
    """
    try:
        timeline = read_timeline(trace, columns=columns, last_s=last_s)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    shares = timeline.shares
    size = -(-len(timeline.devices) // MAX_LANES)
    groups = [timeline.devices[at : at + size] for at in range(0, len(timeline.devices), size)]
    merged = np.add.reduceat(shares, np.arange(0, len(shares), size), axis=0)
    merged /= np.array([len(group) for group in groups])[:, None, None]
    return {
        "names": [group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in groups],
        "kinds": [str(kind) for kind in DeviceUse],
        "start": timeline.start,
        "until": timeline.until,
        "columns": shares.shape[1],
        "shares": np.rint(merged * WHOLE).astype(int).reshape(len(groups), -1).tolist(),
        "totals": merged.mean(axis=1).round(4).tolist(),
        "steps": [step for step in timeline.steps if step[0] != END],
    }
