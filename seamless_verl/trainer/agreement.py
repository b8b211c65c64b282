"""How far trainer and rollout agree about the tokens that are trained."""

from __future__ import annotations

from typing import Any

import transfer_queue as tq


def logprob_difference(batch: Any) -> dict[str, float]:
    """The largest |logprob| difference of trainer and rollout over the generated tokens of a batch."""
    fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    if "rollout_log_probs" not in data:
        return {}
    old, rollout, mask = (data[field].values() for field in fields)
    difference = (old - rollout).abs() * mask
    return {"training/rollout_logprob_diff_max": float(difference.max())}
