"""PPO's clipped objective by token, as verl's `vanilla` loss has it, and verl's call of a policy loss."""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo import core_algos

LARGEST_LOG_RATIO = 20.0
"""Beyond it verl cuts log ratios, in both directions, so that no ratio is infinite."""


def log_ratio(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """log(new / old) of logprobs [rows, response], cut at LARGEST_LOG_RATIO."""
    return (new - old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def dual_clipped(losses: torch.Tensor, advantages: torch.Tensor, config: Any) -> torch.Tensor:
    """Losses of tokens with a negative advantage, at most `clip_ratio_c` times it: dual-clip PPO, arXiv 1912.09729."""
    return torch.where(advantages < 0, torch.minimum(losses, -advantages * config.clip_ratio_c), losses)


def clipped_losses(ratio: torch.Tensor, advantages: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's loss of each token [rows, response], and which tokens the clip leaves without a gradient, bool."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return dual_clipped(torch.maximum(plain, clipped), advantages, config), clipped > plain


def aggregate(losses: torch.Tensor, mask: torch.Tensor, mode: str, config: Any) -> torch.Tensor:
    """verl's `agg_loss`, looked up at the call: the trainer's worker may have put a weighted one there.

    What the mask leaves out is 0 before it is added up, so that an infinite number there does no harm.
    """
    counted = torch.where(mask.bool(), losses, torch.zeros_like(losses))
    return core_algos.agg_loss(loss_mat=counted, loss_mask=mask, loss_agg_mode=mode, **config.global_batch_info)


def mean_over(values: torch.Tensor, mask: torch.Tensor) -> float:
    """The mean over the mask; 0 where it is empty."""
    chosen = values.detach()[mask.bool()]
    return float(chosen.float().mean()) if len(chosen) else 0.0
