"""Whether a series is flat, against lines whose slope is known."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.tools.bench.soak.report import BLOCKS, Verdict, growth, line

AT = [10.0 * number for number in range(360)]  # an hour


def test_a_line_by_hand() -> None:
    slope, error = line([0, 1, 2, 3], [1, 2, 2, 3])
    assert slope == pytest.approx(0.6)  # sum of (-1.5, -0.5, 0.5, 1.5) x (1, 2, 2, 3) = 3, over 5
    assert error == pytest.approx((0.2 / 2 / 5) ** 0.5)  # residuals -0.1, 0.3, -0.3, 0.1: their squares sum to 0.2


@given(st.floats(-1e3, 1e3), st.floats(-1e6, 1e6))
def test_a_straight_line_has_its_slope(hourly: float, begin: float) -> None:
    found = growth(AT, [begin + hourly * at / 3600 for at in AT])
    assert found.hourly == pytest.approx(hourly, abs=1e-6)


def test_what_grows_beyond_noise_is_said() -> None:
    draw = Random(1)
    grows = growth(AT, [1000 + at / 10 + draw.gauss(0, 20) for at in AT])
    assert grows.verdict is Verdict.GROWS and grows.hourly == pytest.approx(360, abs=3 * grows.hourly_error)
    assert growth(AT, [1000 - at / 10 for at in AT]).verdict is Verdict.SHRINKS


def test_noise_and_small_changes_are_flat() -> None:
    draw = Random(2)
    assert growth(AT, [1000 + draw.gauss(0, 200) for _ in AT]).verdict is Verdict.FLAT
    assert growth(AT, [1000 + at / 3600 for at in AT]).verdict is Verdict.FLAT, "0.1% of it"
    assert growth(AT, [50 + at / 3600 for at in AT]).verdict is Verdict.GROWS, "2% of it"
    assert growth(AT, [50 + at / 3600 for at in AT], harmless=1.0).verdict is Verdict.FLAT
    assert growth(AT, [7.0] * len(AT)).verdict is Verdict.FLAT


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        growth(AT[: 2 * BLOCKS - 1], [0.0] * (2 * BLOCKS - 1))
