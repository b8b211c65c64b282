"""`loss_mode=interpolated`: decoupled PPO whose proximal policy is interpolated, not computed.

Decoupled PPO (Hilton et al., arXiv 2110.00641; Fu et al., AReaL, arXiv 2505.24298) has three policies: the behavior
policy b that generated a token, the proximal policy p that the clip is about, and the trained policy t. Its loss is
w * max(-A r, -A clip(r)) with r = t / p and w = p / b. AReaL's `prox_logp_method=loglinear`
(areal/trainer/ppo/actor.py, docs/en/algorithms/prox_approx.md of github.com/inclusionAI/AReaL) saves the forward pass
that p would cost:

    log p = log b + a (log t - log b),   a = (v_p - v_b) / (v_t - v_b)

with the versions v of the three. Two things are defined differently here, by what `algorithms/loss_call.py` knows:

- v_t is not v_p + 1, but v_p plus the share of the update that is done: before its first optimizer step a = 1 for every
  stale token, so that nothing is clipped, and w is the exact ratio.
- A token of the proximal version has a = 0: w = 1, and the loss is plain PPO's. Before the first optimizer step the
  fraction is 0 / 0, and 0 is the limit of the later steps.

w is detached and at most `TRUNCATE`, as verl's `rollout_is=token` cuts it.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_policy_loss

from seamless_verl.algorithms.clipped import aggregate, clipped_losses, log_ratio, mean_over
from seamless_verl.algorithms.loss_call import CONTEXT, LossCall, this_call

TRUNCATE = 2.0
"""The largest importance weight of a token, proximal to behavior policy."""


def interpolation(call: LossCall) -> torch.Tensor:
    """The a of each token: float32 [rows, response], between 0 (the behavior policy) and 1 (the trained one)."""
    stale = call.staleness()
    behind = stale + (call.current - call.proximal)
    generated = (call.versions != CONTEXT) & (stale > 0)
    return torch.where(generated, stale / behind.clamp(min=torch.finfo(torch.float32).tiny), torch.zeros_like(stale))


@register_policy_loss("interpolated")
def interpolated_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss and its metrics; tensors are [rows, response].

    `old_log_prob` are the behavior policy's, as `bypass_mode` has them.
    """
    call = this_call()
    share = interpolation(call).to(log_prob.dtype)
    moved = log_ratio(log_prob, old_log_prob)
    proximal = (old_log_prob + share * moved).detach()
    ratio = torch.exp(log_ratio(log_prob, proximal))
    weight = torch.exp(share * moved).detach().clamp(max=TRUNCATE)
    losses, clipped = clipped_losses(ratio, advantages, config)
    losses = losses * weight
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = aggregate(losses, response_mask, loss_agg_mode, config)
    return loss, {
        "actor/pg_clipfrac": mean_over(clipped, response_mask),
        "actor/ppo_kl": mean_over(-moved, response_mask),
        "actor/interpolation": mean_over(share, response_mask),
        "actor/behavior_weight": mean_over(weight, response_mask),
    }
