"""A fixed number of samples is divided in proportion, within bounds."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.algorithms.samplers.gdro import apportion

WEIGHTS = st.lists(st.integers(0, 1000).map(lambda number: number / 1000), min_size=1, max_size=12)


def names(count: int) -> list[str]:
    return [f"p{i:02}" for i in range(count)]


def test_by_hand() -> None:
    assert apportion([1.0, 0.5, 0.5], 16, least=2, most=128, names=names(3)) == [8, 4, 4]
    assert apportion([1.0, 0.0, 0.0], 12, least=2, most=128, names=names(3)) == [8, 2, 2]
    assert apportion([1.0, 0.1, 0.1], 24, least=2, most=10, names=names(3)) == [10, 7, 7]
    assert apportion([0.0, 0.0], 9, least=2, most=8, names=["b", "a"]) == [4, 5], "equal ones go by their names"
    assert apportion([0.5, 0.3, 0.2], 11, least=2, most=128, names=names(3)) == [6, 3, 2], "5.5, 3.3 and 2.2"


@given(WEIGHTS, st.integers(1, 4), st.integers(0, 30), st.data())
def test_the_sum_is_fixed_and_a_larger_weight_never_gets_less(
    weights: list[float], least: int, span: int, data: st.DataObject
) -> None:
    count, most = len(weights), least + span
    total = data.draw(st.integers(least * count, most * count))
    given_out = apportion(weights, total, least=least, most=most, names=names(count))
    assert sum(given_out) == total and all(least <= number <= most for number in given_out)
    ordered = [number for _, number in sorted(zip(weights, given_out, strict=True))]
    assert all(before <= after for before, after in pairwise(ordered))
    order = data.draw(st.permutations(range(count)))
    shuffled = apportion(
        [weights[i] for i in order], total, least=least, most=most, names=[names(count)[i] for i in order]
    )
    assert shuffled == [given_out[i] for i in order]


def test_bounds_that_have_no_room_are_kept() -> None:
    assert apportion([1.0, 0.5], 2, least=2, most=8, names=names(2)) == [2, 2]
    assert apportion([1.0, 0.5], 20, least=2, most=8, names=names(2)) == [8, 8]
    assert sum(apportion([5e-324, 0.0, 1.0, 1e-300], 115, least=3, most=33, names=names(4))) == 115
    assert apportion([], 0, least=2, most=8, names=[]) == []
