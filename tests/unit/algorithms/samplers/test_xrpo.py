"""Samples go where one more narrows the interval of a mean most."""

from __future__ import annotations

from math import isfinite, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.algorithms.samplers import GroupResult, PromptHistory, SamplingView
from seamless_verl.algorithms.samplers.xrpo import Xrpo, deviation_of, gain, half_width, student_t

TABLE = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    10: 2.228,
    30: 2.042,
    120: 1.980,
}


def history(prompt: str, *outcomes: float) -> PromptHistory:
    return PromptHistory(prompt, (GroupResult.of(outcomes),) if outcomes else ())


def test_students_points_by_the_table() -> None:
    for freedom, point in TABLE.items():
        assert student_t(freedom) == pytest.approx(point, abs=6e-4), freedom
    assert all(student_t(freedom) > student_t(freedom + 1) for freedom in range(1, 200))


def test_the_gain_by_hand() -> None:
    """s = 0.5: h(2) = 12.706 x 0.5 / sqrt(2) = 4.492, h(3) = 4.303 x 0.5 / sqrt(3) = 1.242."""
    assert half_width(0.5, 2) == pytest.approx(4.4923, abs=1e-3)
    assert gain(0.5, 2) == pytest.approx(4.4923 - 1.2421, abs=1e-3)
    assert gain(0.0, 2) == 0
    assert deviation_of(history("p", 0, 1, 1, 1)) == pytest.approx(sqrt(0.25))
    assert deviation_of(history("p")) == deviation_of(history("p", 1.0)) == 0.5


def test_a_prompt_that_is_known_gets_the_least() -> None:
    """Of 12 samples each has 2; mixed outcomes, s = 0.577, get the other six before certain ones, which gain nothing.

    Of the gains of 0.577, 3.75, 0.52, 0.20 and 0.11, two are above the first of 0.05, 0.33, and none below 0.33 is.
    """
    offered = (history("mixed", 0, 0, 1, 1), history("right", 1, 1, 1, 1), history("wrong", 0, 0, 0, 0))
    assert Xrpo().decide(SamplingView(4, offered)).samples == (8, 2, 2)
    assert Xrpo(most=5).decide(SamplingView(4, offered)).samples == (5, 4, 3), "the rest is spread evenly"
    assert Xrpo().decide(SamplingView(4, offered[1:])).samples == (4, 4)
    both = (history("mixed", 0, 0, 1, 1), history("nearly", 0, 0, 0, 0.1))
    assert Xrpo().decide(SamplingView(4, both)).samples == (5, 3)


OUTCOMES = st.lists(st.floats(0, 1), max_size=6)


@given(st.lists(OUTCOMES, min_size=1, max_size=6), st.integers(2, 8), st.randoms())
def test_the_sum_is_fixed_whatever_the_order(found: list[list[float]], samples: int, order: object) -> None:
    offered = [history(f"p{i}", *outcomes) for i, outcomes in enumerate(found)]
    assert all(isfinite(deviation_of(one)) for one in offered)
    given_out = Xrpo().decide(SamplingView(samples, tuple(offered))).samples
    by_name = dict(zip([one.prompt for one in offered], given_out, strict=True))
    assert sum(given_out) == samples * len(offered) and min(given_out) >= 2
    order.shuffle(offered)  # type: ignore[attr-defined]
    again = Xrpo().decide(SamplingView(samples, tuple(offered))).samples
    assert again == tuple(by_name[one.prompt] for one in offered)
