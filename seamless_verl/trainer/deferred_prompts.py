"""The deferred prompts' data: in a partition of TransferQueue of their own, which verl's checkpoints keep too."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import transfer_queue as tq
from verl.utils import tensordict_utils as tu

from seamless_verl.agent_loops.assignments import TRAIN

DEFERRED = "deferred"
BEGUN_AGAIN = uuid.uuid5(uuid.NAMESPACE_OID, "deferred prompts that begin again")


def put_aside(uids: Sequence[str], step: int) -> None:
    """Copies these prompts of the training partition, which the caller then clears."""
    batch = tq.kv_batch_get(keys=list(uids), partition_id=TRAIN)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
    tq.kv_batch_put(keys=list(uids), partition_id=DEFERRED, tags=tags, fields=batch)


def take_out(uids: Sequence[str], step: int) -> Any:
    """A batch of these prompts for `step`, as the dataloader would give it: each is a new group, with a uid of its own.

    The uid follows from the one that was deferred, so that a resumed run gives it again and its sessions are found. The
    prompts are deferred no longer.
    """
    batch = tq.kv_batch_get(keys=list(uids), partition_id=DEFERRED)
    tu.assign_non_tensor_stack(batch, "uid", [name_again(uid) for uid in uids])
    tu.assign_non_tensor_data(batch, "global_steps", step)
    tq.kv_clear(keys=list(uids), partition_id=DEFERRED)
    return batch


def name_again(uid: str) -> str:
    """The uid that a deferred prompt begins again under; another one at each deferral."""
    return str(uuid.uuid5(BEGUN_AGAIN, uid))


def stored() -> list[str]:
    """The uids of all deferred prompts, in the order in which they were deferred."""
    return list((tq.kv_list(DEFERRED) or {}).get(DEFERRED, {}))
