"""`loss_mode=m2po`: in the place of PPO's clip, a mask that bounds the second moment of the log ratios.

M2PO, "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?" (Zheng et al., arXiv
2510.01161), algorithm 1. With r the ratio of the trained to the behavior policy:

    T = the tokens of the trust region: A > 0 and r > 1, or A < 0 and r < 1
    while the mean of (log r)^2 over T is above the threshold: mask the token of T with the largest one, take it out

The loss is -r A of what remains, over all tokens. Tokens outside of T are never masked, as PPO's clip never stops them:
the authors' code has it so (github.com/Infini-AI-Lab/M2PO, verl/trainer/ppo/core_algos.py), with dual-clip PPO's bound
for negative advantages, here verl's `clip_ratio_c`. AReaL's variant (`M2_THRESHOLD`) takes all tokens for T.

Of tokens with the same (log r)^2 either none is masked or all are, so that the order of tokens does not matter. The
mean is over the tokens of one call: a micro-batch of a rank.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_policy_loss

from seamless_verl.algorithms.clipped import aggregate, dual_clipped, log_ratio, mean_over


def kept(log_ratios: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
    """Which tokens are trained, bool [rows, response]: those under `mask` that the second moment leaves.

    `log_ratios` and `advantages` are [rows, response], without a gradient.
    """
    trained = mask.bool()
    bounded = trained & (log_ratios * advantages > 0)
    squares = log_ratios.double().square()
    ascending = squares[bounded].sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=ascending.device)
    remaining = int((means <= threshold).sum())  # the means of the smallest n do not fall with n
    if remaining == len(ascending):
        return trained
    return trained & ~(bounded & (squares >= ascending[remaining]))


M2_THRESHOLD = 0.04
"""The largest mean of the squared log ratios of the tokens that the trust region bounds."""


@register_policy_loss("m2po")
def m2po_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss and its metrics; tensors are [rows, response]. What is masked still counts in the mean's divisor."""
    moved = log_ratio(log_prob, old_log_prob)
    keep = kept(moved.detach(), advantages, response_mask, M2_THRESHOLD)
    losses = dual_clipped(-advantages * torch.exp(moved), advantages, config)
    losses = torch.where(keep, losses, torch.zeros_like(losses))
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = aggregate(losses, response_mask, loss_agg_mode, config)
    return loss, {
        "actor/pg_clipfrac": mean_over(~keep, response_mask),
        "actor/ppo_kl": mean_over(-moved, response_mask),
        "actor/second_moment": mean_over(moved.square(), keep),
    }
