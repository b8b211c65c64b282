"""Masks generated tokens of a batch that are not trained: too old by their weight versions, or of rows left out.

The mask is decided once, when the batch is taken, since the trainer's version is known only then. Masked tokens are
counted as dropped in the run's token account.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict

from seamless_verl.trajectory.policies import TokenPolicy, TokenView
from seamless_verl.trajectory.records import Grammar

FIELDS = ["weight_version", "response_mask"]


def mask_stale(batch: Any, policy: TokenPolicy, trainer_version: int) -> tuple[int, int]:
    """Masks in TransferQueue what the policy does not train; returns how many tokens are trained, how many masked.

    verl's padding rows are left as they are: they have no token to train.
    """
    keys = own_keys(batch)
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=FIELDS)
    before = list(data["response_mask"].unbind())
    after = masks(zip(data["weight_version"].unbind(), before, strict=True), policy, trainer_version)
    trained, generated = (sum(int(mask.sum()) for mask in column) for column in (after, before))
    if trained < generated:
        put_masks(batch, keys, after)
    return trained, generated - trained


def mask_rows(batch: Any, keys: Sequence[str]) -> int:
    """Masks these rows whole in TransferQueue; returns how many tokens of theirs would have been trained."""
    data = tq.kv_batch_get(keys=list(keys), partition_id=batch.partition_id, select_fields=["response_mask"])
    before = list(data["response_mask"].unbind())
    put_masks(batch, keys, [torch.zeros_like(mask) for mask in before])
    return sum(int(mask.sum()) for mask in before)


def put_masks(batch: Any, keys: Sequence[str], masks: Sequence[torch.Tensor]) -> None:
    """Writes these rows' masks, [R] each, for verl's two names of them."""
    nested = torch.nested.as_nested_tensor(list(masks), layout=torch.jagged)
    fields = TensorDict({"response_mask": nested, "loss_mask": nested.clone()}, batch_size=len(keys))
    tq.kv_batch_put(keys=list(keys), partition_id=batch.partition_id, fields=fields)


def own_keys(batch: Any) -> list[str]:
    """Of the rows that are not verl's padding, whose columns of ours are another row's, and of another length."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]


def masks(
    columns: Iterable[tuple[torch.Tensor, torch.Tensor]], policy: TokenPolicy, trainer_version: int
) -> list[torch.Tensor]:
    """The masks to train by, from columns of versions int64 [R] and masks [R]; they keep the masks' dtype."""
    decided = list[torch.Tensor]()
    for versions, mask in columns:
        view = TokenView(versions.numpy().astype("int32"), mask.numpy().astype(bool), trainer_version)
        decided.append(torch.from_numpy(policy.decide(view)).to(mask.dtype))
    return decided


def agreement(batch: Any) -> dict[str, float]:
    """How far the logprobs of trainer and rollout agree over the trained tokens of a batch, by `agreement_of`."""
    fields = ["old_log_probs", "rollout_log_probs", "response_mask", "grammar"]
    data = tq.kv_batch_get(keys=own_keys(batch), partition_id=batch.partition_id, select_fields=fields)
    if "rollout_log_probs" not in data:
        return {}
    old, rollout, mask, labels = (data[field].values() for field in fields)
    trained = mask.bool()
    return agreement_of(old[trained], rollout[trained], labels[trained])


def agreement_of(trainer: torch.Tensor, rollout: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Metrics of two columns of logprobs float32 [N] and their `Grammar` [N], apart for tokens under a grammar.

    For each kind of which there are tokens: their number, and the mean and the largest |difference| in nats.
    """
    difference = (trainer - rollout).abs()
    metrics = {"training/rollout_logprob_diff_max": float(difference.max())} if len(difference) else {}
    for kind, of_kind in (("plain", labels == Grammar.NONE), ("grammar", labels != Grammar.NONE)):
        if len(values := difference[of_kind]):
            found = {"tokens": len(values), "mean": float(values.mean()), "max": float(values.max())}
            metrics |= {f"seamless/agreement/{kind}/{name}": float(value) for name, value in found.items()}
    return metrics
