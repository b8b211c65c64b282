"""What each device did over time, for the page: lanes of a trace, in columns as wide as a few pixels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from seamless_verl.resources.ledger.activity import DeviceUse
from seamless_verl.resources.ledger.trace import END
from seamless_verl.tools.view.timeline import Timeline, read_timeline

MAX_LANES = 64
WHOLE = 1000  # of a share


@dataclass(frozen=True)
class Lanes:
    """Lanes of [start, until), in seconds since the run's start; `columns` of each.

    `shares` has for each lane, column after column, the share of each of `kinds` in thousandths. `totals` are shares of
    the whole window, 0 to 1, of each lane. `steps` are (label, end) in the window; what came after the
    last one is no step.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    start: float
    until: float
    columns: int
    shares: list[list[int]]
    totals: list[list[float]]
    steps: tuple[tuple[str, float], ...]


def read_lanes(trace: Path, *, columns: int, last_s: float | None = None) -> Lanes | None:
    """The lanes of the trace, or of its last `last_s` seconds; None before the first step, or of another program's.

    More devices than fit are shown as groups of neighbours, averaged.
    """
    try:
        timeline = read_timeline(trace, columns=columns, last_s=last_s)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return lanes_of(timeline)


def lanes_of(timeline: Timeline) -> Lanes:
    shares = timeline.shares
    size = -(-len(timeline.devices) // MAX_LANES)
    groups = [timeline.devices[at : at + size] for at in range(0, len(timeline.devices), size)]
    merged = np.add.reduceat(shares, np.arange(0, len(shares), size), axis=0)
    merged /= np.array([len(group) for group in groups])[:, None, None]
    return Lanes(
        tuple(group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in groups),
        tuple(str(kind) for kind in DeviceUse),
        timeline.start,
        timeline.until,
        shares.shape[1],
        np.rint(merged * WHOLE).astype(int).reshape(len(groups), -1).tolist(),
        merged.mean(axis=1).round(4).tolist(),
        tuple(step for step in timeline.steps if step[0] != END),
    )
