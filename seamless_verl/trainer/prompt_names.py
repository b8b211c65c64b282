"""Names the prompts that a run draws, defers and goes on with, so that a resumed run gives them the same names.

verl gives each prompt a random uid, and draws what was drawn after the checkpoint under another one after a resume, so
that nothing that the journal has of it could be found again. Here a uid follows from the run, from how many prompts it
drew before, and from the prompt itself. Without `data.seed` verl draws another subset (`data.train_max_samples`) at
each start, so a run chooses a seed, and keeps it. Deferred prompts stand in a partition of TransferQueue of their own.
"""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu

from seamless_verl.agent_loops.assignments import TRAIN, VALIDATION
from seamless_verl.agent_loops.loops import task_of
from seamless_verl.agent_loops.row_keys import prompt_of

DEFERRED = "deferred"
BEGUN_AGAIN = uuid.uuid5(uuid.NAMESPACE_OID, "deferred prompts that begin again")


class PromptNames:
    """The names of one run; its first start chooses its name and its data's seed, which each checkpoint has."""

    def __init__(self) -> None:
        self.run, self.drawn = uuid.uuid4().hex, 0
        self.seed = int(self.run[:8], 16)

    def take(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Uids for the prompts that are drawn next; `rows` are theirs in the data set, with any uid."""
        first, self.drawn = self.drawn, self.drawn + len(rows)
        return [self._uid(first + number, row) for number, row in enumerate(rows)]

    def _uid(self, number: int, row: Mapping[str, Any]) -> str:
        task = {name: value for name, value in task_of(row).items() if name != "uid"}
        return str(uuid.uuid5(uuid.UUID(self.run), f"{number} {json.dumps(task, sort_keys=True)}"))

    def state_dict(self) -> dict[str, Any]:
        return {"run": self.run, "drawn": self.drawn, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on as the run that saved this."""
        self.run, self.drawn, self.seed = str(state["run"]), int(state["drawn"]), int(state["seed"])


def data_rows(batch: TensorDict) -> list[dict[str, Any]]:
    """The prompts of a batch as rows of the data set, without tensors."""
    columns = {name: column.tolist() for name, column in batch.items() if isinstance(column, NonTensorStack)}
    return [{name: values[i] for name, values in columns.items()} for i in range(len(batch))]


def pending(uids: Sequence[str], step: int) -> list[dict[str, Any]]:
    """TransferQueue's tags of these prompts where their groups begin, as of `step`."""
    return [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]


def by_step(submitted: Mapping[str, int]) -> list[tuple[int, list[str]]]:
    """The prompts of each step, of the steps in which they were submitted; oldest first."""
    found = defaultdict[int, list[str]](list)
    for uid, step in submitted.items():
        found[step].append(uid)
    return sorted(found.items())


def put_aside(uids: Sequence[str], step: int) -> None:
    """Copies these prompts of the training partition to the deferred ones; the caller then clears them there."""
    batch = tq.kv_batch_get(keys=list(uids), partition_id=TRAIN)
    tq.kv_batch_put(keys=list(uids), partition_id=DEFERRED, tags=pending(uids, step), fields=batch)


def take_out(uids: Sequence[str], step: int) -> Any:
    """A batch of these prompts, deferred no longer, for `step`: each is a new group, with the uid `name_again`."""
    batch = tq.kv_batch_get(keys=list(uids), partition_id=DEFERRED)
    tu.assign_non_tensor_stack(batch, "uid", [name_again(uid) for uid in uids])
    tu.assign_non_tensor_data(batch, "global_steps", step)
    tq.kv_clear(keys=list(uids), partition_id=DEFERRED)
    return batch


def name_again(uid: str) -> str:
    """The uid that a deferred prompt begins again under; another one at each deferral."""
    return str(uuid.uuid5(BEGUN_AGAIN, uid))


def stored_deferred() -> list[str]:
    """The uids of all deferred prompts, in the order in which they were deferred."""
    return list((tq.kv_list(DEFERRED) or {}).get(DEFERRED, {}))


def drop_validation() -> None:
    """Clears what a checkpoint's queue has of a validation beside training, which no run goes on with."""
    if left := list((tq.kv_list(VALIDATION) or {}).get(VALIDATION, {})):
        tq.kv_clear(keys=left, partition_id=VALIDATION)


def drop_trained(partition_id: str = TRAIN) -> dict[str, Mapping[str, Any]]:
    """Clears the rows that a checkpoint's queue has of its last step; returns the tags of all others.

    verl saves before it clears a step's rows, whose prompts are gone by then; each resume would keep them for ever.
    """
    tags = (tq.kv_list(partition_id) or {}).get(partition_id, {})
    prompts = {key for key, tag in tags.items() if tag.get("is_prompt")}
    kept = {key: tag for key, tag in tags.items() if key in prompts or prompt_of(key) in prompts}
    if trained := list(tags.keys() - kept.keys()):
        tq.kv_clear(keys=trained, partition_id=partition_id)
    return kept
