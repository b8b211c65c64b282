"""Divides a fixed number of samples among prompts in proportion to weights, within bounds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, fsum

HALVINGS = 100  # of the interval in which the scale is searched: more than a float has digits
SMALLEST = 1e-6  # of the largest weight: a smaller one counts as this, so that one scale fits all


def apportion(weights: Sequence[float], total: int, *, least: int, most: int, names: Sequence[str]) -> list[int]:
    """Whole numbers from `least` to `most` that add up to `total`, in proportion to `weights` within the bounds.

    What proportion leaves over goes to the largest remainders, of equal ones by `names`: the result does not depend on
    the order. Weights are finite and not negative; those below a millionth of the largest count as that, and where all
    are 0 they are equal. Without room for `total` within the bounds, every prompt has the nearer bound.
    """
    count = len(weights)
    if not count:
        return []
    if not least * count <= total <= most * count:
        return [least if total < least * count else most] * count
    largest = max(weights)
    shares = _bounded([max(one / largest, SMALLEST) if largest else 1.0 for one in weights], total, least, most)
    given = [min(most, max(least, floor(share + 1e-9))) for share in shares]
    by_need = sorted(range(count), key=lambda i: (given[i] - shares[i], names[i], i))
    while (left := total - sum(given)) > 0:
        for i in [i for i in by_need if given[i] < most][:left]:
            given[i] += 1
    return given


def _bounded(weights: Sequence[float], total: int, least: int, most: int) -> list[float]:
    """Each weight times one scale, within the bounds, so that they add up to `total` or a little less."""

    def shares(scale: float) -> list[float]:
        return [min(float(most), max(float(least), scale * weight)) for weight in weights]

    low, high = 0.0, most / min(weights)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fsum(shares(middle)) <= total else (low, middle)
    return shares(low)
