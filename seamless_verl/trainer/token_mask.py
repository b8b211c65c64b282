"""The token mask of a batch: which generated tokens are fresh enough to train, by their weight versions.

The mask is decided once, when the batch is taken, for only then is the trainer's version known. What it leaves out
is counted as dropped in the run's token account.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transfer_queue as tq

from seamless_verl.errors import IntegrityError
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.policies import TokenPolicy, TokenView

FIELDS = ["weight_version", "response_mask"]


def mask_stale(batch: Any, policy: TokenPolicy, trainer_version: int) -> tuple[int, int]:
    """Masks in TransferQueue what the policy does not train; returns how many tokens are trained, how many masked."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=FIELDS)
    before = list(data["response_mask"].unbind())
    after = masks(zip(data["weight_version"].unbind(), before, strict=True), policy, trainer_version)
    trained, generated = (sum(int(mask.sum()) for mask in some) for some in (after, before))
    if trained < generated:
        nested = torch.nested.as_nested_tensor(after, layout=torch.jagged)
        data["response_mask"], data["loss_mask"] = nested, nested.clone()
        fields = data.select("response_mask", "loss_mask")
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
    return trained, generated - trained


def drop_masked(metrics: dict[str, float], masked: int) -> dict[str, float]:
    """The token account's metrics with `masked` tokens counted as dropped for their age, not as trained.

    A gateway's sessions are counted as trained when TransferQueue has them, before their tokens are masked. Metrics
    without a token account are returned as they are.

    Raises:
        IntegrityError: more tokens were masked than were given to be trained.
    """
    trained, stale = "tokens/trained", f"tokens/dropped/{DropReason.STALE}"
    if trained not in metrics:
        return metrics
    moved = metrics | {trained: metrics[trained] - masked, stale: metrics[stale] + masked}
    if moved[trained] < 0:
        raise IntegrityError("tokens masked for their age, of those trained", int(metrics[trained]), masked)
    return moved


def masks(
    columns: Iterable[tuple[torch.Tensor, torch.Tensor]], policy: TokenPolicy, trainer_version: int
) -> list[torch.Tensor]:
    """The masks to train by, of versions int64 [R] and masks [R]; same dtype as the masks given."""
    fresh = list[torch.Tensor]()
    for versions, mask in columns:
        view = TokenView(versions.numpy().astype("int32"), mask.numpy().astype(bool), trainer_version)
        fresh.append(torch.from_numpy(policy.decide(view)).to(mask.dtype))
    return fresh


def logprob_difference(batch: Any) -> dict[str, float]:
    """The largest |logprob| difference of trainer and rollout over the generated tokens of a batch."""
    fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    if "rollout_log_probs" not in data:
        return {}
    old, rollout, mask = (data[field].values() for field in fields)
    difference = (old - rollout).abs() * mask
    return {"training/rollout_logprob_diff_max": float(difference.max())}
