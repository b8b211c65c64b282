"""Which series of a soak are flat, and its table and page of plots. Pure.

The slope is that of a line of least squares through means of blocks, with Student's confidence interval, by the scatter
of the blocks about the line. Samples of one block hang together, as memory does; means of long blocks do so less, which
is why the line is drawn through few of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import sqrt
from statistics import mean

import numpy as np

from seamless_verl.cli.output import text_table
from seamless_verl.tools.compare.figures import QUANTILES
from seamless_verl.tools.compare.page import COLOURS, figure, page_of

BLOCKS = 12
QUANTILE = QUANTILES[BLOCKS - 2]  # degrees of freedom of a line's slope
HOUR_S = 3600.0
MIB = float(1 << 20)
UNITS = {"memory": MIB, "shared memory": MIB, "disk": MIB}
HARMLESS = {"memory": 2 * MIB, "shared memory": 2 * MIB, "disk": 2 * MIB, "descriptors": 1.0, "threads": 1.0}
HARMLESS_PART = 0.01
"""A change of a series over the measured time that counts as none: so much, or this part of its mean."""
DASHES = ("solid", "dot", "dash")
HEADER = ("what", "of", "first", "last", "an hour", "+-", "")
Series = tuple[str, str]
"""What, of whom: ("memory", "ray::DataPlane") in bytes, ("shared memory", "all"), ("disk", "journal")."""


@dataclass(frozen=True)
class Sample:
    """One look at a run: `at` in seconds since its start, the steps it had logged, and each series' value."""

    at: float
    steps: int
    values: Mapping[Series, float]


class Verdict(StrEnum):
    """What a series does."""

    FLAT = "flat"
    GROWS = "grows"
    SHRINKS = "shrinks"


@dataclass(frozen=True)
class Growth:
    """A series' first and last block, its change in an hour with the half width of the 95% interval, and the verdict.

    `moves` is False where all values are the same.
    """

    first: float
    last: float
    hourly: float
    hourly_error: float
    verdict: Verdict
    moves: bool


def growth(at: Sequence[float], values: Sequence[float], harmless: float = 0.0) -> Growth:
    """Of values at times in seconds, which ascend; `harmless` is a change over the whole time that counts as none.

    Raises:
        ValueError: there are fewer than two samples for a block.
    """
    if len(values) < 2 * BLOCKS:
        raise ValueError(f"{len(values)} samples are too few for {BLOCKS} blocks of 2")
    edges = [round(index * len(values) / BLOCKS) for index in range(BLOCKS + 1)]
    times, means = ([mean(of[low:high]) for low, high in pairwise(edges)] for of in (at, values))
    slope, error = line(times, means)
    change = abs(slope * (at[-1] - at[0]))
    verdict = Verdict.GROWS if slope > 0 else Verdict.SHRINKS
    if abs(slope) <= QUANTILE * error or change <= max(harmless, HARMLESS_PART * abs(mean(values))):
        verdict = Verdict.FLAT
    moves = min(values) < max(values)
    return Growth(means[0], means[-1], slope * HOUR_S, QUANTILE * error * HOUR_S, verdict, moves)


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The slope of the line of least squares, and its standard error."""
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    return float(slope), sqrt(covariance[0, 0])


def measured(samples: Sequence[Sample], warm_up: float) -> list[Sample]:
    """Those after the part of the time in which the run warms up."""
    begin = samples[0].at + warm_up * (samples[-1].at - samples[0].at) if samples else 0.0
    return [sample for sample in samples if sample.at >= begin]


def growths(samples: Sequence[Sample]) -> dict[Series, Growth]:
    """Of each series that all samples have; one that came or went, as a worker of Ray does, is in `passing`."""
    at = [sample.at for sample in samples]
    return {
        series: growth(at, [sample.values[series] for sample in samples], HARMLESS.get(series[0], 0.0))
        for series in sorted(always(samples))
    }


def always(samples: Sequence[Sample]) -> set[Series]:
    return set.intersection(*(set(sample.values) for sample in samples)) if samples else set()


def passing(samples: Sequence[Sample]) -> set[Series]:
    """Series that some samples have and others do not."""
    return {series for sample in samples for series in sample.values} - always(samples)


def titled(what: str) -> str:
    return f"{what}, MiB" if what in UNITS else what


def table(found: Mapping[Series, Growth]) -> str:
    """A row for each series that was not the same all the time."""
    rows = []
    for (what, whom), one in found.items():
        if one.moves:
            unit = UNITS.get(what, 1.0)
            numbers = (f"{one.first / unit:,.1f}", f"{one.last / unit:,.1f}")
            changes = (f"{one.hourly / unit:+,.2f}", f"{one.hourly_error / unit:,.2f}")
            verdict = "" if one.verdict is Verdict.FLAT else str(one.verdict)
            rows.append((titled(what), whom, *numbers, *changes, verdict))
    return text_table(HEADER, rows)


def summary(samples: Sequence[Sample], found: Mapping[Series, Growth]) -> str:
    """One paragraph: how long, how many steps, and what is not flat."""
    hours, steps = (samples[-1].at - samples[0].at) / 3600, samples[-1].steps - samples[0].steps
    others = [f"{what} of {whom} {one.verdict}" for (what, whom), one in found.items() if one.verdict != Verdict.FLAT]
    rest = f"; not flat: {', '.join(others)}" if others else ""
    gone = f"; not there in all samples: {len(passing(samples))} series" if passing(samples) else ""
    return (
        f"{hours:.2f} hours, {steps} steps, {len(samples)} samples in {BLOCKS} blocks: "
        f"{len(found) - len(others)} of {len(found)} series are flat{rest}{gone}"
    )


def page(title: str, lead: str, samples: Sequence[Sample], begin: float) -> str:
    """A page of HTML that opens without a network: a plot for each thing held, with a line for each holder."""
    return page_of("plots.html.jinja", plots(samples, begin), title=title, lead=lead)


def plots(samples: Sequence[Sample], begin: float) -> Iterator[tuple[str, str, object]]:
    names = dict.fromkeys(series for sample in samples for series in sample.values)
    for what in dict.fromkeys(series[0] for series in names):
        unit = UNITS.get(what, 1.0)
        found = figure("minutes", "MiB" if what in UNITS else "number")
        for index, series in enumerate(sorted(one for one in names if one[0] == what)):
            own = [sample for sample in samples if series in sample.values]
            x, y = [one.at / 60 for one in own], [one.values[series] / unit for one in own]
            style = {"color": COLOURS[index % len(COLOURS)], "dash": DASHES[index // len(COLOURS) % len(DASHES)]}
            found.add_scatter(x=x, y=y, mode="lines", name=series[1], line=style)
        found.add_vline(x=begin / 60, line_dash="dot", line_color="#999999")
        yield titled(what), "", found
