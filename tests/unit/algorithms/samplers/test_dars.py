"""DARS by the paper's numbers, and what holds for any rewards."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.algorithms.samplers import FinishedGroup, GroupResult, GroupVerdict, PromptHistory, SamplingView
from seamless_verl.algorithms.samplers.dars import MOST, Dars, extra_samples

RIGHT_OF_8 = range(5)
OUTCOMES = st.lists(st.sampled_from([0.0, 1.0]) | st.floats(0, 1), min_size=1, max_size=16)


def result(right: int, number: int = 8) -> GroupResult:
    return GroupResult.of([1.0] * right + [0.0] * (number - right))


@pytest.mark.parametrize(("schedule", "extra"), [("equal", [24, 11, 3, 1, 0]), ("hardness", [56, 24, 8, 3, 0])])
def test_the_papers_numbers(schedule: str, extra: list[int]) -> None:
    assert [extra_samples(result(right), schedule, MOST[schedule]) for right in RIGHT_OF_8] == extra
    assert [extra_samples(result(right), schedule, MOST[schedule]) for right in range(5, 9)] == [0] * 4


def test_by_hand_without_the_bound() -> None:
    """p = 1/16: S = 2 x 1/16 x 15/16 = 15/128, N S = 15/16. (4 - 15/16) / S = 26.1; (7.5 - 15/16) / S = 56."""
    assert extra_samples(result(0), "equal", 1000) == 27
    assert extra_samples(result(0), "hardness", 1000) == 56
    assert extra_samples(result(1, 4), "equal", 32) == 2, "p = 1/4: S = 3/8, N S = 3/2, (2 - 3/2) / S = 1.33"


def judge(sampler: Dars, group: FinishedGroup) -> GroupVerdict:
    (verdict,) = sampler.decide(SamplingView(8, finished=(group,))).groups
    return verdict


def finished(outcomes: list[float], first: int | None = None) -> FinishedGroup:
    return FinishedGroup(PromptHistory("p"), GroupResult.of(outcomes), first)


def test_a_group_is_reopened_once_and_dropped_without_an_advantage() -> None:
    dars = Dars()
    assert judge(dars, finished([0.0] * 8)) == GroupVerdict(extra=24)
    assert judge(dars, finished([0.0] * 32, first=8)).drop == "all of its 32 samples were wrong"
    assert judge(dars, finished([0.0] * 31 + [1.0], first=8)) == GroupVerdict()
    assert judge(dars, finished([1.0] * 8)).drop == "all of its 8 samples were right"
    assert judge(dars, finished([0.0] * 3 + [1.0] * 5)) == GroupVerdict()


@given(OUTCOMES, st.sampled_from(sorted(MOST)), st.integers(2, 64))
def test_it_is_bounded_and_enough(outcomes: list[float], schedule: str, most: int) -> None:
    first = GroupResult.of(outcomes)
    extra = extra_samples(first, schedule, most)
    assert extra >= 0 and first.samples + extra <= max(most, first.samples)
    if extra and first.samples + extra < most:
        rate = Fraction(first.total) / first.samples or Fraction(1, 2 * first.samples)
        weight = 2 * rate * (1 - rate)
        target = Fraction(first.samples, 2) if schedule == "equal" else (1 - rate) * first.samples
        assert (first.samples + extra) * weight >= target > (first.samples + extra - 1) * weight


@given(st.permutations([0.0, 0.1, 0.2, 0.3, 1.0, 0.0]))
def test_the_order_of_samples_does_not_matter(outcomes: list[float]) -> None:
    assert extra_samples(GroupResult.of(outcomes), "equal", 32) == 2  # p = 4/15: S = 176/450, (3 - 6 S) / S = 1.7


@pytest.mark.parametrize("right", [0, 1])
def test_a_group_of_one_gets_no_more(right: int) -> None:
    """Of one sample p = 0 counts as 1/2, which is not hard."""
    assert extra_samples(result(right, 1), "equal", 32) == 0
