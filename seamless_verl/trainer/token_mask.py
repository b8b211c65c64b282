"""Which tokens of a batch are fresh enough to train, decided as it is taken: the mask follows their weight versions.

How far trainer and rollout agree about the tokens that are trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transfer_queue as tq

from seamless_verl.trajectory.policies import TokenPolicy, TokenView

FIELDS = ["weight_version", "response_mask"]


def keep_fresh(batch: Any, policy: TokenPolicy, trainer_version: int) -> dict[str, float]:
    """Mask in the queue what the policy does not train; returns how many tokens are trained and how many not."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=FIELDS)
    before = list(data["response_mask"].unbind())
    after = masks(zip(data["weight_version"].unbind(), before, strict=True), policy, trainer_version)
    trained, generated = (sum(int(mask.sum()) for mask in some) for some in (after, before))
    if trained < generated:
        nested = torch.nested.as_nested_tensor(after, layout=torch.jagged)
        data["response_mask"], data["loss_mask"] = nested, nested.clone()
        fields = data.select("response_mask", "loss_mask")
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
    return {"seamless/tokens/trained": trained, "seamless/tokens/masked_as_stale": generated - trained}


def masks(
    columns: Iterable[tuple[torch.Tensor, torch.Tensor]], policy: TokenPolicy, trainer_version: int
) -> list[torch.Tensor]:
    """The masks to train by, of versions int64 [R] and masks [R]; same dtype as the masks given."""
    fresh = []
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
