"""Masks the generated tokens of a batch that are too old to train, by their weight versions.

The mask is decided once, when the batch is taken, since the trainer's version is known only then. Masked tokens are
counted as dropped in the run's token account.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transfer_queue as tq

from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.policies import TokenPolicy, TokenView

FIELDS = ["weight_version", "response_mask"]


def mask_stale(batch: Any, policy: TokenPolicy, trainer_version: int) -> tuple[int, int]:
    """Masks in TransferQueue what the policy does not train; returns how many tokens are trained, how many masked."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=FIELDS)
    before = list(data["response_mask"].unbind())
    after = masks(zip(data["weight_version"].unbind(), before, strict=True), policy, trainer_version)
    trained, generated = (sum(int(mask.sum()) for mask in column) for column in (after, before))
    if trained < generated:
        nested = torch.nested.as_nested_tensor(after, layout=torch.jagged)
        data["response_mask"], data["loss_mask"] = nested, nested.clone()
        fields = data.select("response_mask", "loss_mask")
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
    return trained, generated - trained


def drop_masked(metrics: dict[str, float], masked: int) -> dict[str, float]:
    """The token account's metrics with `masked` tokens counted as dropped for their age, not as trained.

    A gateway's sessions are counted as trained when TransferQueue has them, before their tokens are masked. `masked`
    counts the whole run; an account that restarted with its data plane may have fewer, and never falls below zero.
    Metrics without a token account are returned as they are.
    """
    trained, stale = "tokens/trained", f"tokens/dropped/{DropReason.STALE}"
    if trained not in metrics:
        return metrics
    moved = min(masked, metrics[trained])
    return metrics | {trained: metrics[trained] - moved, stale: metrics[stale] + moved}


def masks(
    columns: Iterable[tuple[torch.Tensor, torch.Tensor]], policy: TokenPolicy, trainer_version: int
) -> list[torch.Tensor]:
    """The masks to train by, from columns of versions int64 [R] and masks [R]; they keep the masks' dtype."""
    decided = list[torch.Tensor]()
    for versions, mask in columns:
        view = TokenView(versions.numpy().astype("int32"), mask.numpy().astype(bool), trainer_version)
        decided.append(torch.from_numpy(policy.decide(view)).to(mask.dtype))
    return decided


def logprob_difference(batch: Any) -> dict[str, float]:
    """The largest |logprob| difference of trainer and rollout over the generated tokens of a batch."""
    fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    if "rollout_log_probs" not in data:
        return {}
    old, rollout, mask = (data[field].values() for field in fields)
    difference = (old - rollout).abs() * mask
    return {"training/rollout_logprob_diff_max": float(difference.max())}
