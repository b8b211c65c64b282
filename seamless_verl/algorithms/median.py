"""`algorithm.adv_estimator=mc_grpo`: advantages from the median of a group, and its median session is not trained.

MC-GRPO, "Median-Centered Group Relative Policy Optimization for Small-Rollout Reinforcement Learning" (Kim, arXiv
2601.22582; code github.com/lotusroot-kim/MC-GRPO, src/open_r1/grpo_trainer_gsm.py). Of a group of n = G + 1 sessions
with rewards r, of which k differ from the median:

    d = r - median(r),   A = d / (median(|d|) + 0.001) * n / k

The session at the median, the pivot, is left out of training: it has an advantage of 0, and would only count in the
loss's denominators, entropy and KL terms. So G sessions are trained.

Rewards of two values have median(|d|) = 0 in every group of odd size: of 0, 0, 1 the formula makes 0, 0, 3000. Two
bounds, which the authors do not have:

- Where median(|d|) is 0, the largest |d| takes its place: 0, 0, 1 gives 0, 0, 3 (2.997 with the 0.001).
- No advantage is above n or below -n, what a single session that differs has: 0, 0.001, 1 is bounded too.

An even group, which a failed session leaves, has no pivot, and all its sessions are trained. Of several sessions at the
median the first is the pivot. A group of one has the advantage 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

from seamless_verl.algorithms.estimate import groups_of, rewards_of_rows, this_estimate

EPSILON = 1e-3


def median_of(values: torch.Tensor) -> torch.Tensor:
    """The median of float [n]; of an even number the mean of the middle two, where torch takes the lower one."""
    ordered, middle = values.sort().values, len(values) // 2
    return (ordered[(len(values) - 1) // 2] + ordered[middle]) / 2


def median_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """The advantages of one group, float64 [n], from its rewards, float [n]."""
    rewards = rewards.double()
    size = len(rewards)
    deviations = rewards - median_of(rewards)
    differing = int((deviations != 0).sum())
    if not differing:
        return deviations
    spread = median_of(deviations.abs())
    scale = spread if spread > 0 else deviations.abs().max()
    return (deviations / (scale + EPSILON) * size / differing).clamp(-size, size)


def pivot_of(rewards: torch.Tensor) -> int | None:
    """Which session of a group with these rewards, [n], is the median: the first of several; None in an even group."""
    if len(rewards) % 2 == 0:
        return None
    return int((rewards == median_of(rewards)).nonzero()[0])


@register_adv_est("mc_grpo")
def mc_grpo_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Iterable[object], **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, which are the same, float [rows, response]; `index` names each row's group.

    A row's reward is the sum of its `token_level_rewards`, [rows, response].

    Raises:
        ValueError: a reward is not finite.
    """
    estimate, rewards = this_estimate(), rewards_of_rows(token_level_rewards)
    advantages = torch.zeros_like(rewards)
    for rows in groups_of(index):
        advantages[rows] = median_advantages(rewards[rows]).to(advantages.dtype)
        pivot = pivot_of(rewards[rows]) if len(rows) > 1 else None
        estimate.untrained += [] if pivot is None else [rows[pivot]]
    by_token = advantages[:, None] * response_mask
    return by_token, by_token
