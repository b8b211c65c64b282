"""The rows of a put, by columns, as TransferQueue's own storage takes them apart again.

verl makes a TensorDict of jagged tensors and stacks of objects. TransferQueue describes its columns twice and then
splits them into single values, each time in Python: together 14 ms for 8 rows with 27 columns, of which here 0.4 are
left. Its storage keeps single values and joins them when they are read, so that a reader sees no difference.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transfer_queue import get_client
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from seamless_verl.agent_loops.queue_writer import Fields

# said once in each process by the tensors below, whose layout is the older one
warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype", category=UserWarning)


class QueueColumns(dict[str, Any]):
    """What a put reads of a TensorDict: its columns, and how many rows it has.

    A column of tensors is one tensor, [rows, ...], nested with the strided layout where shapes differ; any other column
    is the list of its values.
    """

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        """`rows` have the same columns; a column whose tensors differ in rank or dtype raises RuntimeError."""
        super().__init__({name: joined([row[name] for row in rows]) for name in rows[0]})
        self.batch_size = torch.Size([len(rows)])


def joined(values: list[Any]) -> torch.Tensor | list[Any]:
    """A column of these values, one for each row."""
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    if all(value.shape == values[0].shape for value in values):
        return torch.stack(values)
    return torch.nested.as_nested_tensor(values, layout=torch.strided)


def columns_of_storage() -> Fields:
    """How rows become the fields of a put with the storage of this process's client, which `tq.init` has made.

    Storages other than TransferQueue's own read more of a TensorDict than its columns.
    """
    storage = get_client().storage_manager
    return QueueColumns if type(storage) is AsyncSimpleStorageManager else list_of_dict_to_tensordict
