"""The advantages by which a batch is trained, in brief for the journal: what a reader of a session wants to know.

Invariant: this only reads what the trainer has put into TransferQueue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import transfer_queue as tq

from seamless_verl.trainer.token_mask import own_keys

FIELDS = ["advantages", "response_mask"]


def advantages_of(batch: Any) -> dict[str, dict[str, list[float]]]:
    """By prompt and the number of its session, as text: mean, least and greatest advantage of its trained tokens."""
    if not (keys := own_keys(batch)):
        return {}
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=FIELDS)
    return in_brief(zip(keys, *(data[field].unbind() for field in FIELDS), strict=True))


def in_brief(rows: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> dict[str, dict[str, list[float]]]:
    """Of rows `<uid>_<session>_<sequence>`: advantages float [R], mask [R]; a session without any is left out."""
    columns: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
    for key, advantages, mask in rows:
        uid, session, _ = key.rsplit("_", 2)
        if len(trained := advantages[mask.bool()]):
            columns[uid, session].append(trained.double())
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for (uid, session), parts in columns.items():
        column = torch.cat(parts)
        found[uid][session] = [round(float(value), 6) for value in (column.mean(), column.min(), column.max())]
    return dict(found)
