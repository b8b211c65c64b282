"""Spread, ratios of pairs, and the interval of a difference."""

from __future__ import annotations

import pytest

from seamless_verl.tools.compare.figures import median_or_none
from seamless_verl.tools.compare.statistics import MeanOfRuns, Spread, pair_ratios


def test_a_spread_is_of_the_values_that_there_are() -> None:
    assert Spread.of([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([None]) is None and median_or_none([]) is None


def test_a_ratio_is_of_a_pair_and_not_of_two_medians() -> None:
    """A machine that becomes twice as slow changes both runs of a pair."""
    assert pair_ratios({"a": 20.0, "b": 10.0, "c": 1.0}, {"a": 10.0, "b": 5.0, "d": 1.0}) == [2.0, 2.0]
    assert pair_ratios({"a": 1.0}, {"a": 0.0}) == []


def test_noise_is_that_of_welchs_test() -> None:
    """Variances 0.01 and 0.0004 of two and three runs: 1.05 degrees of freedom, of which one counts."""
    first, other = MeanOfRuns.of([0.4, 0.4 + 0.02**0.5]), MeanOfRuns.of([0.48, 0.5, 0.52])
    assert first.difference(other)[1] == pytest.approx(12.71 * (0.01 / 2 + 0.0004 / 3) ** 0.5)
    same = MeanOfRuns.of([0.5, 0.5])
    assert same.difference(same) == (0, 0)
