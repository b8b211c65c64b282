"""`algorithm.adv_estimator=grpo_novelty`: GRPO's advantages, with a bonus for right answers that are improbable.

The "novelty-aware advantage sharpening" of XRPO (Bamba et al., arXiv 2510.06672). With s the mean logprob of a
session's tokens, and mean(s) over the sessions of its group,

    eta = exp(s - mean(s)),   A' = A + min(max(2.5 (1 - eta), 0), 0.5 A)   for a right answer, and A' = A for others

A right answer is one with A > 0 here: of rewards 0 and 1 these are the right ones, but where all are right, and there
the bonus is at most 0.5 A = 0. With other rewards it is an answer that is better than its group.

A is verl's own GRPO, with or without the standard deviation (`norm_adv_by_std_in_grpo`). Logprobs are PPO's old ones:
those of the trainer, or the engine's with `bypass_mode`. XRPO's allocation of rollouts and its seeding of prompts are
no estimators, and not here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est

from seamless_verl.algorithms.estimate import groups_of, rewards_of_rows, this_estimate

STRENGTH, LARGEST_SHARE = 2.5, 0.5


def novelty_bonus(advantages: torch.Tensor, mean_log_probs: torch.Tensor) -> torch.Tensor:
    """The bonuses of one group, float [n], from its advantages and the sessions' mean logprobs, float [n] each.

    A session without a logprob (NaN) has no bonus, and does not count in the mean.
    """
    relative = torch.exp(mean_log_probs - mean_log_probs.nanmean()).nan_to_num(nan=1.0)
    bonus = (STRENGTH * (1 - relative)).clamp(min=0.0)
    return torch.where(advantages > 0, torch.minimum(bonus, LARGEST_SHARE * advantages), torch.zeros_like(advantages))


@register_adv_est("grpo_novelty")
def novelty_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    config: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, which are the same, float [rows, response]; `index` names each row's group.

    Raises:
        ValueError: a reward is not finite.
    """
    estimate = this_estimate()
    rewards_of_rows(token_level_rewards)
    advantages = grpo_of(token_level_rewards, index, config)
    bonuses = torch.zeros_like(advantages)
    for rows in groups_of(index):
        of_group = estimate.mean_log_probs[rows].to(advantages.dtype)
        bonuses[rows] = novelty_bonus(advantages[rows], of_group)
    right = advantages > 0
    estimate.metrics["seamless/novelty/bonus"] = float(bonuses[right].mean()) if right.any() else 0.0
    by_token = (advantages + bonuses)[:, None] * response_mask
    return by_token, by_token


def grpo_of(token_level_rewards: torch.Tensor, index: Iterable[object], config: Any) -> torch.Tensor:
    """verl's GRPO advantage of each row, float [rows]."""
    by_std = True if config is None else bool(config.get("norm_adv_by_std_in_grpo", True))
    ones = torch.ones(len(token_level_rewards), 1, dtype=token_level_rewards.dtype)
    found, _ = compute_grpo_outcome_advantage(token_level_rewards, ones, index, norm_adv_by_std_in_grpo=by_std)
    return torch.as_tensor(found)[:, 0]
