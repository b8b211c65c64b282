"""`seamless.sampler.name=gdro`: hard prompts get more samples, easy ones fewer, with a fixed sum.

The budgets of group distributionally robust optimization (arXiv 2601.19280). Each prompt has a moving average p of the
pass rates of its groups, p <- (1 - rate) p + rate x pass rate with `rate` 0.15, which begins with its first group's.
The prompts that are submitted together share `rollout.n` samples each, in proportion to 1 - p, from `least` 2 to
`most` 128. A prompt without a group counts as p = 0.5.

The sum is fixed for prompts that are submitted together: those of a step, or those that there is room for when a
mini-batch was trained. A prompt that is submitted alone, as for a dropped group, gets `rollout.n`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, fsum
from typing import ClassVar

from seamless_verl.algorithms.samplers.sampler import PromptHistory, Sampler

LEAST, MOST, RATE = 2, 128, 0.15
UNKNOWN = 0.5  # the pass rate of a prompt that has had no group
HALVINGS = 100  # of the interval in which the scale is searched: more than a float has digits
SMALLEST = 1e-6  # of the largest weight: a smaller one counts as this, so that one scale fits all


def moving_pass_rate(history: PromptHistory, rate: float) -> float:
    """The moving average of the pass rates of a prompt's groups."""
    if not history.groups:
        return UNKNOWN
    average = history.groups[0].pass_rate
    for group in history.groups[1:]:
        average += rate * (group.pass_rate - average)
    return average


class Gdro(Sampler):
    """Its averages follow from the prompts' histories, so that it remembers nothing of its own."""

    OPTIONS: ClassVar[tuple[str, ...]] = ("rate", "least", "most")

    def __init__(self, *, rate: float = RATE, least: int = LEAST, most: int = MOST) -> None:
        self.rate, self.least, self.most = rate, least, most

    def _samples(self, offered: Sequence[PromptHistory], default: int) -> Sequence[int]:
        weights = [1 - moving_pass_rate(history, self.rate) for history in offered]
        names = [history.prompt for history in offered]
        return apportion(weights, default * len(offered), least=self.least, most=self.most, names=names)


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
