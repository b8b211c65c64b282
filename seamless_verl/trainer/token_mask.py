"""What of a batch is trained: its tokens, unless they are too old or their row is left out, and the columns for it.

The mask is decided once, when the batch is taken, since the trainer's version is known only then. Masked tokens are
counted as dropped in the run's token account.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from seamless_verl.trajectory.policies import TokenPolicy, TokenView
from seamless_verl.trajectory.records import Grammar

FIELDS = ["weight_version", "response_mask"]
AGREEMENT = "seamless/agreement/"
ENGINE, RECORD = f"{AGREEMENT}engine/", f"{AGREEMENT}record/"  # of `trainer/mismatch.py`
COUNTS_OF_AGREEMENT = (f"{AGREEMENT}plain/tokens", f"{AGREEMENT}grammar/tokens")
UNTRAINED = frozenset(
    (
        *("raw_prompt", "reward_model", "extra_info", "agent_name"),
        *("tools_kwargs", "interaction_kwargs", "ability", "dummy_tensor"),
        *("session_id", "num_turns", "metrics", "extra_fields", "mm_processor_kwargs", "mm_processor_output"),
    )
)
"""Columns that verl's agent loops and data sets write to describe a prompt, its tools and its session."""


def mask_stale(batch: Any, policy: TokenPolicy, trainer_version: int) -> tuple[int, int]:
    """Masks in TransferQueue what the policy does not train; returns how many tokens are trained, how many masked."""
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


def trained_tokens(batch: Any) -> int:
    """How many tokens of a batch are to be trained."""
    data = tq.kv_batch_get(keys=own_keys(batch), partition_id=batch.partition_id, select_fields=["response_mask"])
    return sum(int(mask.sum()) for mask in data["response_mask"].unbind())


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
    return with_means(difference_sums(trainer, rollout, labels))


def difference_sums(trainer: torch.Tensor, rollout: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """The same with the sum of differences for the mean, which can be added up over parts of a batch."""
    difference = (trainer - rollout).abs()
    metrics = {"training/rollout_logprob_diff_max": float(difference.max())} if len(difference) else {}
    for kind, of_kind in (("plain", labels == Grammar.NONE), ("grammar", labels != Grammar.NONE)):
        values = difference[of_kind]
        found = {"tokens": len(values), "sum": float(values.sum())} | (
            {"max": float(values.max())} if len(values) else {}
        )
        metrics |= {f"{AGREEMENT}{kind}/{name}": float(value) for name, value in found.items()}
    return metrics


def with_means(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with the means of `difference_sums` for its sums; without kinds of which there are no tokens."""
    sums = {name: value for name, value in metrics.items() if name.startswith(AGREEMENT) and name.endswith("/sum")}
    kinds = {name.removesuffix("sum"): value for name, value in sums.items()}
    means = {f"{kind}mean": value / tokens for kind, value in kinds.items() if (tokens := metrics[f"{kind}tokens"])}
    left_out = {*sums, *(f"{kind}tokens" for kind in kinds if f"{kind}mean" not in means)}
    return {name: value for name, value in metrics.items() if name not in left_out} | means


def figures(name: str, differences: NDArray[np.float32]) -> dict[str, float]:
    """Their number, mean and largest, under names that begin so; nothing of none."""
    if not len(differences):
        return {}
    found = {"tokens": len(differences), "mean": differences.mean(), "max": differences.max()}
    return {f"{name}{figure}": float(value) for figure, value in found.items()}


def rows_at(batch: KVBatchMeta, places: Sequence[int]) -> KVBatchMeta:
    """These rows of a batch."""
    keys, tags = [batch.keys[i] for i in places], [batch.tags[i] for i in places]
    return KVBatchMeta(keys=keys, tags=tags, partition_id=batch.partition_id)


def trained_columns(names: Sequence[str] | None) -> list[str] | None:
    """These columns without UNTRAINED ones, which no update reads; None, all of them, stays None.

    A worker gets every column that the batch names, and a column of objects costs it more than one of tensors, while
    its device waits. Any other may be meant for a loss or an engine of a user's own; so may `data_source` and `index`.
    """
    return None if names is None else [name for name in names if name not in UNTRAINED]
