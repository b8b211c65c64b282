"""verl's micro-batches, with what sequences share counted once: families stay together, and more sequences fit."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceOp
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine.utils import prepare_micro_batches

from seamless_verl.errors import ConfigError
from seamless_verl.shared_prefixes.packing import pack

LIMITS = (
    "ppo_max_token_len_per_gpu of actor, log_prob_max_token_len_per_gpu of rollout or ref, or"
    " ppo_infer_max_token_len_per_gpu of critic"
)


def packed_micro_batches(
    data: Any, dp_group: ProcessGroup | None = None, num_batches_divided_by: int | None = None, **options: Any
) -> tuple[list[Any], list[list[int]] | None]:
    """In the place of verl's `prepare_micro_batches`: a rank's micro-batches, and the indices of their sequences.

    At most `max_token_len_per_gpu` tokens are computed in each, and all ranks have the same number of them. Those of a
    fixed number of sequences, and of groups that a loss compares, are verl's.
    """
    asked = {"use_dynamic_bsz": True, "force_group_size": 1}
    if any(tu.get_non_tensor_data(data, key=key, default=value) != value for key, value in asked.items()):
        return prepare_micro_batches(  # type: ignore[no-any-return]
            data, dp_group=dp_group, num_batches_divided_by=num_batches_divided_by, **options
        )
    sequences = [ids.cpu().numpy() for ids in data["input_ids"].unbind()]
    limit = int(data["max_token_len_per_gpu"]) * int(tu.get_non_tensor_data(data, key="sp_size", default=1))
    if (longest := max(map(len, sequences))) > limit:
        raise ConfigError(LIMITS, limit, f"a sequence has {longest} tokens", f"Set it to at least {longest}")
    indices = pack(sequences, limit)
    needed = of_all_ranks(len(indices), dp_group)
    needed += -needed % (num_batches_divided_by or 1)
    if needed > len(indices):
        indices = pack(sequences, limit, needed)
    return [tu.index_select_tensor_dict(data, batch) for batch in indices], indices


def of_all_ranks(number: int, group: ProcessGroup | None) -> int:
    """The largest of the ranks' numbers."""
    if group is None:
        return number
    found = torch.tensor([number], device=get_device_name())
    torch.distributed.all_reduce(found, op=ReduceOp.MAX, group=group)
    return int(found.item())
