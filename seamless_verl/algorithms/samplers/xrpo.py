"""`seamless.sampler.name=xrpo`: samples go where one more says most about a prompt's mean reward.

The allocator of XRPO (arXiv 2510.06672). The mean of n samples is known to within the half-width of its 95% interval,

    h(n) = t s / sqrt(n),   with t the 97.5% point of Student's distribution of n - 1 degrees of freedom,

and one more sample gains h(n) - h(n + 1). s is the standard deviation of all outcomes that the prompt has had. Of the
`rollout.n` samples for each of the prompts that are submitted together, each prompt gets `least` 2, and the others go
one by one to where they gain most, at most `most` 128 to a prompt.

The paper's rounds are within one step, after a first round for all prompts; here what a prompt had in earlier visits
stands for that round, so that no group waits. A prompt without two samples counts as s = 0.5, the largest of right and
wrong. The paper's bonus for exploration, and its seeding of failed prompts with examples, are left out. Where no prompt
gains, since all had equal outcomes, the samples are spread evenly.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import sqrt
from typing import ClassVar

from seamless_verl.algorithms.samplers.sampler import PromptHistory, Sampler

LEAST, MOST = 2, 128
UNKNOWN = 0.5  # the deviation of a prompt whose outcomes are not known
NORMAL = 1.959963984540054  # the 97.5% point of the normal distribution
EXACT = (12.706204736, 4.302652730, 3.182446305, 2.776445105, 2.570581836)
"""The 97.5% points for 1 to 5 degrees of freedom, for which the series is too coarse."""


def student_t(freedom: int) -> float:
    """The 97.5% point of Student's distribution, to 2e-4.

    From 6 degrees of freedom on by the expansion of Cornish and Fisher (Abramowitz and Stegun, 26.7.5).
    """
    if freedom <= len(EXACT):
        return EXACT[freedom - 1]
    z = NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def half_width(deviation: float, samples: int) -> float:
    """Of the 95% interval of a mean of `samples` outcomes, two or more."""
    return student_t(samples - 1) * deviation / sqrt(samples)


def gain(deviation: float, samples: int) -> float:
    """By how much one more sample than `samples` narrows the half-width."""
    return half_width(deviation, samples) - half_width(deviation, samples + 1)


def deviation_of(history: PromptHistory) -> float:
    """The standard deviation of all outcomes of a prompt."""
    known = history.all_samples
    return UNKNOWN if known is None or known.samples < 2 else known.deviation


class Xrpo(Sampler):
    """It remembers nothing of its own."""

    OPTIONS: ClassVar[tuple[str, ...]] = ("least", "most")

    def __init__(self, *, least: int = LEAST, most: int = MOST) -> None:
        self.least, self.most = least, most

    def _samples(self, offered: Sequence[PromptHistory], default: int) -> Sequence[int]:
        given = [self.least] * len(offered)
        deviations = [deviation_of(history) for history in offered]

        def entry(i: int) -> tuple[float, int, str, int]:
            return -gain(deviations[i], given[i]), given[i], offered[i].prompt, i

        best = [entry(i) for i in range(len(offered)) if self.least < self.most]
        heapq.heapify(best)
        for _ in range((default - self.least) * len(offered)):
            if not best:
                break
            *_, i = heapq.heappop(best)
            given[i] += 1
            if given[i] < self.most:
                heapq.heappush(best, entry(i))
        return given
