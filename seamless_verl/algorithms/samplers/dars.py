"""`seamless.sampler.name=dars`: a group of a hard prompt gets more samples before it is trained.

DARS, difficulty adaptive rollout sampling (arXiv 2508.13755). Of the first N samples of a prompt (`rollout.n`, 8 in the
paper), a share p is right; p = 0 counts as 0.5 / N. A group's weight in GRPO without the division by the standard
deviation is N S with S = 2 p (1 - p), the sum of the absolute advantages, which is largest at p = 0.5: N / 2. Prompts
with p >= 0.5 get no more. Others get as many more samples as bring their weight to

    equal:      N / 2        extra = ceil((N / 2 - N S) / S),       at most 32 samples in all
    hardness:   (1 - p) N    extra = ceil(((1 - p) N - N S) / S),   at most 64 samples in all

For N = 8 and p = 0, 1/8, 1/4, 3/8 and 1/2 these are 24 (27 without the bound), 11, 3, 1, 0 and 56, 24, 8, 3, 0. First
and extra samples are trained together. A group that is all wrong or all right then has no advantage, and is dropped.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import ClassVar

from seamless_verl.algorithms.samplers.sampler import TRAIN_IT, FinishedGroup, GroupResult, GroupVerdict, Sampler

MOST = {"equal": 32, "hardness": 64}
"""Samples of a group in all, by schedule, in the paper."""


def extra_samples(first: GroupResult, schedule: str, most: int) -> int:
    """How many more samples a group gets after its first ones. Computed in fractions, so that nothing is rounded up."""
    number = first.samples
    rate = Fraction(first.total) / number
    if rate >= Fraction(1, 2):
        return 0
    rate = rate or Fraction(1, 2 * number)
    weight = 2 * rate * (1 - rate)
    target = Fraction(number, 2) if schedule == "equal" else (1 - rate) * number
    wanted = ceil((target - number * weight) / weight)
    return max(0, min(wanted, most - number))


class Dars(Sampler):
    """Reopens groups of hard prompts once, and drops groups without an advantage."""

    OPTIONS: ClassVar[tuple[str, ...]] = ("most",)
    REOPENS: ClassVar[bool] = True
    schedule: ClassVar[str] = "equal"

    def __init__(self, *, most: int | None = None) -> None:
        self.most = MOST[self.schedule] if most is None else most

    def _judge(self, group: FinishedGroup) -> GroupVerdict:
        extra = 0 if group.first is not None else extra_samples(group.result, self.schedule, self.most)
        if extra:
            return GroupVerdict(extra)
        if group.result.all_wrong or group.result.all_right:
            how = "wrong" if group.result.all_wrong else "right"
            return GroupVerdict(drop=f"all of its {group.result.samples} samples were {how}")
        return TRAIN_IT


class DarsHardness(Dars):
    """The same with DARS's other schedule, which gives hard prompts more weight than middling ones."""

    schedule: ClassVar[str] = "hardness"
