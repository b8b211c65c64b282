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
    steps: tuple[tuple[str, float], ...]  # (label, end) of each step that ends in the window

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
    names: dict[int, str] = {}
    steps = list[tuple[str, float]]()
    for event in read_events(path, skipping=STRETCH_PREFIXES):
        if event["pid"] == DEVICES and event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        elif event["pid"] == STEPS and event["ph"] == "X":
            steps.append((event["name"], (event["ts"] + event["dur"]) / 1e6))
    devices = tuple(names[lane] for lane in sorted(names))
    if not steps or steps[-1][1] <= 0:
        raise ValueError(f"{path}: the run ended before its first step did, so no time is counted in it")
    until = steps[-1][1]
    start = 0.0 if last_s is None else max(0.0, until - last_s)
    covered, width = np.zeros((len(devices), len(COLUMN_OF), columns)), (until - start) / columns
    for event in read_events(path):
        if event["ph"] == "X" and event["pid"] in (DEVICES, LATE):
            low = (event["ts"] / 1e6 - start) / width
            high = low + event["dur"] / 1e6 / width
            was = DeviceUse(event["args"]["was"]) if event["pid"] == LATE else DeviceUse.IDLE
            lane = covered[event["tid"]]
            _add_stretch(lane[COLUMN_OF[DeviceUse(event["name"])]], low, high, 1.0)
            _add_stretch(lane[COLUMN_OF[was]], low, high, -1.0)
    covered[:, COLUMN_OF[DeviceUse.IDLE]] += 1.0
    grid = np.moveaxis(covered, 1, 2)
    shown = tuple((label, end) for label, end in steps if end > start)
    return Timeline(devices, start, until, grid.clip(0.0, 1.0) * width, shown)


def _add_stretch(shares: NDArray[np.float64], low: float, high: float, weight: float) -> None:
    """Adds to the share of each column, [columns], what the stretch covers of it; `low` and `high` are in columns."""
    low, high = max(low, 0.0), min(high, float(len(shares)))
    if low < high:
        first, last = int(low), min(int(high), len(shares) - 1)
        shares[first : last + 1] += weight
        shares[first] -= weight * (low - first)
        shares[last] -= weight * (last + 1 - high)


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
