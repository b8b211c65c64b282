"""Is a series flat? The slope of a line through means of blocks, with its confidence interval. Pure.

Least squares; the interval is Student's, by the scatter of the blocks about the line (N. R. Draper and H. Smith,
Applied Regression Analysis, chapter 1). Samples of one block hang together, as memory does; means of long blocks do so
less, which is why the line is drawn through few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import sqrt
from statistics import mean

from seamless_verl.tools.compare.statistics import QUANTILES

BLOCKS = 12
QUANTILE = QUANTILES[BLOCKS - 2]  # degrees of freedom of a line's slope
HARMLESS = 0.01  # a change over the whole time below this part of the mean is none that anybody would notice
HOUR_S = 3600.0


class Verdict(StrEnum):
    """What a series does."""

    FLAT = "flat"
    GROWS = "grows"
    SHRINKS = "shrinks"


@dataclass(frozen=True)
class Growth:
    """A series' mean, its change in an hour with the half width of the 95% interval, in its unit; and the verdict.

    `moves` is False where all values are the same.
    """

    mean: float
    first: float
    last: float
    hourly: float
    hourly_error: float
    verdict: Verdict
    moves: bool = True


def growth(at: Sequence[float], values: Sequence[float], harmless: float = 0.0) -> Growth:
    """Of values at times in seconds, which ascend; `harmless` is a change over the whole time that counts as none.

    Raises:
        ValueError: there are fewer than two samples for a block.
    """
    if len(values) < 2 * BLOCKS:
        raise ValueError(f"{len(values)} samples are too few for {BLOCKS} blocks of 2")
    edges = [round(index * len(values) / BLOCKS) for index in range(BLOCKS + 1)]
    times = [mean(at[low:high]) for low, high in pairwise(edges)]
    means = [mean(values[low:high]) for low, high in pairwise(edges)]
    slope, error = line(times, means)
    change = slope * (at[-1] - at[0])
    verdict = Verdict.GROWS if slope > 0 else Verdict.SHRINKS
    if abs(slope) <= QUANTILE * error or abs(change) <= max(harmless, HARMLESS * abs(mean(values))):
        verdict = Verdict.FLAT
    hourly, hourly_error = slope * HOUR_S, QUANTILE * error * HOUR_S
    moves = min(values) < max(values)
    return Growth(mean(values), means[0], means[-1], hourly, hourly_error, verdict, moves)


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The slope of the line of least squares, and its standard error."""
    at, height = mean(x), mean(y)
    spread = sum((one - at) ** 2 for one in x)
    slope = sum((one - at) * (value - height) for one, value in zip(x, y, strict=True)) / spread
    rest = sum((value - height - slope * (one - at)) ** 2 for one, value in zip(x, y, strict=True))
    return slope, sqrt(rest / (len(x) - 2) / spread)
