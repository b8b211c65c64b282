"""Budgets in proportion to how often a prompt fails."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.algorithms.samplers import GroupResult, PromptHistory, SamplingView, make_sampler
from seamless_verl.algorithms.samplers.gdro import RATE, Gdro, moving_pass_rate

RATES = st.lists(st.integers(0, 4), max_size=6)


def history(prompt: str, *right_of_4: int) -> PromptHistory:
    return PromptHistory(prompt, tuple(GroupResult.of([1.0] * n + [0.0] * (4 - n)) for n in right_of_4))


def test_the_moving_average_by_hand() -> None:
    assert moving_pass_rate(history("p"), RATE) == 0.5
    assert moving_pass_rate(history("p", 4), RATE) == 1.0
    assert moving_pass_rate(history("p", 4, 0), RATE) == pytest.approx(0.85)
    assert moving_pass_rate(history("p", 4, 0, 2), RATE) == pytest.approx(0.85 * 0.85 + 0.15 * 0.5)


def test_the_budgets_by_hand() -> None:
    """1 - p is 1, 0.5, 0.5 and 0 of 32 samples: the easy prompt has the least, 2, and the others share 30 as 2 to 1."""
    offered = (history("wrong", 0), history("half", 2), history("new"), history("right", 4))
    assert Gdro().decide(SamplingView(8, offered)).samples == (15, 8, 7, 2), "of equal ones by name"
    assert Gdro(most=10).decide(SamplingView(8, offered)).samples == (10, 10, 10, 2)
    assert Gdro().decide(SamplingView(8, offered[3:])).samples == (8,), "alone it has rollout.n"
    assert Gdro().decide(SamplingView(8)).samples == ()


@given(st.lists(RATES, min_size=1, max_size=8), st.integers(2, 16), st.randoms())
def test_the_sum_is_fixed_whatever_the_order(groups: list[list[int]], samples: int, order: object) -> None:
    offered = [history(f"p{i}", *right) for i, right in enumerate(groups)]
    by_name = dict(zip([one.prompt for one in offered], Gdro().decide(view(samples, offered)).samples, strict=True))
    assert sum(by_name.values()) == samples * len(offered) and min(by_name.values()) >= 2
    order.shuffle(offered)  # type: ignore[attr-defined]
    assert Gdro().decide(view(samples, offered)).samples == tuple(by_name[one.prompt] for one in offered)


def view(samples: int, offered: list[PromptHistory]) -> SamplingView:
    return SamplingView(samples, tuple(offered))


def test_options_that_are_none_are_the_papers() -> None:
    sampler = make_sampler("gdro", {"rate": None, "least": 3, "most": None, "schedule": "equal"})
    assert isinstance(sampler, Gdro) and (sampler.rate, sampler.least, sampler.most) == (0.15, 3, 128)
