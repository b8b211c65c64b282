"""`seamless.correction.scale_lr`: the learning rate of each optimizer step by the effective sample size of its batch.

VCPO, "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs" (Huang et al., arXiv 2602.17616; code
github.com/mit-han-lab/vcpo, verl/workers/actor/megatron_actor.py): with w_i the ratio of the trained to the behavior
policy over the whole of sequence i, of B in the mini-batch,

    ESS = (sum of w_i)^2 / (sum of w_i^2),   lr = base lr * sqrt(min(1, (ESS / B) / base ratio))

The base ratio is 1, the authors' default, so the rate is never raised. Their second part, a baseline from gradient
norms by trajectory, needs a backward pass for each sequence and is left out.

Sums are kept as logarithms, so that no ratio of a long sequence overflows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WeightSums:
    """log of the sum of w and of w^2 over `sequences` sequences; -inf where there is none."""

    log_sum: float = -math.inf
    log_square_sum: float = -math.inf
    sequences: int = 0

    def __add__(self, other: WeightSums) -> WeightSums:
        return WeightSums(
            log_add(self.log_sum, other.log_sum),
            log_add(self.log_square_sum, other.log_square_sum),
            self.sequences + other.sequences,
        )

    @property
    def ess_ratio(self) -> float:
        """ESS / B, above 0 and at most 1; 1 without a sequence."""
        if not self.sequences:
            return 1.0
        return min(1.0, math.exp(2 * self.log_sum - self.log_square_sum) / self.sequences)

    @property
    def lr_scale(self) -> float:
        return math.sqrt(self.ess_ratio)


def weight_sums(log_ratios: torch.Tensor, mask: torch.Tensor) -> WeightSums:
    """Of the rows with a token under `mask`; both tensors are [rows, response], the log ratios by token."""
    trained = mask.bool()
    of_rows = torch.where(trained, log_ratios.detach().double(), 0.0).sum(dim=-1)[trained.any(dim=-1)]
    if not len(of_rows):
        return WeightSums()
    return WeightSums(float(of_rows.logsumexp(0)), float((2 * of_rows).logsumexp(0)), len(of_rows))


def total(parts: Iterable[WeightSums]) -> WeightSums:
    """The sums over micro-batches or ranks."""
    return sum(parts, WeightSums())


def log_add(one: float, other: float) -> float:
    """log(exp(one) + exp(other))."""
    larger, smaller = max(one, other), min(one, other)
    return larger if smaller == -math.inf else larger + math.log1p(math.exp(smaller - larger))
