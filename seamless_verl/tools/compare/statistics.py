"""Statistics of few runs: medians with their spread, ratios of pairs, and whether two means differ. Pure.

Two arms are within noise when zero is in the 95% confidence interval of the difference of their means over runs, by
Welch's t test (B. L. Welch, Biometrika 34, 1947): there are few runs, and their variances differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, median, variance
from typing import TypeVar

QUANTILES = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 10: 2.23, 15: 2.13, 30: 2.04}
"""Student's t, two-sided 95%, by degrees of freedom; for those between, the next lower ones."""
Pair = TypeVar("Pair")
LEAST_RUNS = 2  # of which a variance can be estimated


@dataclass(frozen=True)
class Spread:
    """The median of some values, the lowest and the highest of them."""

    median: float
    lowest: float
    highest: float
    values: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of the values that there are; None without any."""
        found = [value for value in values if value is not None]
        return cls(median(found), min(found), max(found), len(found)) if found else None


@dataclass(frozen=True)
class RewardTest:
    """The reward of an arm less that of the baseline, and half the width of the difference's 95% interval."""

    difference: float
    half_width: float

    @property
    def equal(self) -> bool:
        return abs(self.difference) <= self.half_width

    @classmethod
    def of(cls, own: Sequence[float], other: Sequence[float]) -> RewardTest | None:
        """Of the rewards of runs, those of the baseline last; None with too few of either."""
        if min(len(own), len(other)) < LEAST_RUNS:
            return None
        return cls(*MeanOfRuns.of(own).difference(MeanOfRuns.of(other)))


@dataclass(frozen=True)
class MeanOfRuns:
    """The mean over an arm's runs, the variance of that mean, and the number of runs, two or more."""

    mean: float
    mean_variance: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanOfRuns:
        return cls(mean(values), variance(values) / len(values), len(values))

    def difference(self, other: MeanOfRuns) -> tuple[float, float]:
        """This mean less the other, and half the width of that difference's 95% confidence interval."""
        both = self.mean_variance + other.mean_variance
        each = (arm.mean_variance**2 / (arm.runs - 1) for arm in (self, other))
        freedom = both**2 / sum(each) if both else 1.0
        return self.mean - other.mean, QUANTILES[max(n for n in QUANTILES if n <= max(freedom, 1) + 1e-9)] * sqrt(both)


def pair_ratios(values: Mapping[Pair, float], baseline: Mapping[Pair, float]) -> list[float]:
    """Values over the baseline's of the same pair, where both have one and the baseline's is not 0."""
    return [value / baseline[pair] for pair, value in values.items() if baseline.get(pair)]
