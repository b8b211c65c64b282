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
from typing import ClassVar

from seamless_verl.algorithms.samplers.apportion import apportion
from seamless_verl.algorithms.samplers.history import PromptHistory
from seamless_verl.algorithms.samplers.sampler import BaseSampler

LEAST, MOST, RATE = 2, 128, 0.15
UNKNOWN = 0.5  # the pass rate of a prompt that has had no group


def moving_pass_rate(history: PromptHistory, rate: float) -> float:
    """The moving average of the pass rates of a prompt's groups."""
    if not history.groups:
        return UNKNOWN
    average = history.groups[0].pass_rate
    for group in history.groups[1:]:
        average += rate * (group.pass_rate - average)
    return average


class Gdro(BaseSampler):
    """Its averages follow from the prompts' histories, so that it remembers nothing of its own."""

    OPTIONS: ClassVar[tuple[str, ...]] = ("rate", "least", "most")

    def __init__(self, *, rate: float = RATE, least: int = LEAST, most: int = MOST) -> None:
        self.rate, self.least, self.most = rate, least, most

    def _samples(self, offered: Sequence[PromptHistory], default: int) -> Sequence[int]:
        weights = [1 - moving_pass_rate(history, self.rate) for history in offered]
        names = [history.prompt for history in offered]
        return apportion(weights, default * len(offered), least=self.least, most=self.most, names=names)
