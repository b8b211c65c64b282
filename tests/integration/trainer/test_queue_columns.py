"""What agent loops put into TransferQueue is read as if verl had made a TensorDict of it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.integration
LENGTHS = (3, 1, 4)


def rows(base: int = 0) -> list[dict[str, Any]]:
    """With columns of every kind that agent loops and data sets have."""
    import torch

    return [
        {
            "responses": torch.arange(length) + base,
            "logprobs": torch.full((length,), -0.5),
            "positions": torch.arange(3 * length).reshape(3, length),
            "kept": torch.ones(length, dtype=torch.bool),
            "same_shape": torch.tensor([place, base]),
            "scalar": torch.tensor(float(place)),
            "uid": f"u{place}",
            "raw_prompt": [{"role": "user", "content": "hm", "calls": [1, None, {"a": [2.5]}]}],
            "extra": {"versions": [1] * length, "score": np.float64(place), "index": np.int64(place), 7: "seven"},
            "array": np.arange(length),
            "objects": np.array([{"a": place}, None], dtype=object),
            "nothing": None,
            "some": torch.ones(2) if place else None,
            "empty": {},
        }
        for place, length in enumerate(LENGTHS)
    ]


def put(queue: Any, fields: Any, partition: str) -> dict[str, Any]:
    """Puts these rows and reads them; the columns as lists of values."""
    keys, tags = [f"k{place}" for place in range(len(LENGTHS))], [{"place": place} for place in range(len(LENGTHS))]
    asyncio.run(queue.async_kv_batch_put(keys=keys, fields=fields, tags=tags, partition_id=partition))
    found = queue.kv_batch_get(keys=keys, partition_id=partition)
    return {name: values_of(found[name]) for name in sorted(found.keys())}


def values_of(column: Any) -> list[Any]:
    return list(column.unbind() if getattr(column, "is_nested", False) else column)


def same(one: Any, other: Any) -> bool:
    import torch

    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def test_columns_are_read_as_those_of_verls_tensordict(clean: Any) -> None:
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    from seamless_verl.agent_loops.queue_columns import QueueColumns, columns_of_storage

    assert columns_of_storage() is QueueColumns
    expected = put(clean, list_of_dict_to_tensordict(rows()), "train")
    found = put(clean, QueueColumns(rows()), "val")
    assert list(found) == list(expected) == sorted(rows()[0])
    for name, values in expected.items():
        for place, (one, other) in enumerate(zip(values, found[name], strict=True)):
            assert same(one, other), (name, place, one, other)


def test_they_are_described_alike_so_that_the_trainer_may_write_its_own_over_them(clean: Any) -> None:
    from transfer_queue.metadata import extract_field_schema
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    from seamless_verl.agent_loops.queue_columns import QueueColumns

    ours, verls = QueueColumns(rows()), list_of_dict_to_tensordict(rows())
    assert extract_field_schema(ours) == extract_field_schema(verls)
    put(clean, ours, "train")
    again = put(clean, list_of_dict_to_tensordict(rows(100)), "train")
    assert [value.tolist() for value in again["responses"]] == [[100, 101, 102], [100], [100, 101, 102, 103]]
    once_more = put(clean, QueueColumns(rows(200)), "train")
    assert [value.tolist() for value in once_more["responses"]] == [[200, 201, 202], [200], [200, 201, 202, 203]]


def test_tensors_that_make_no_column_are_refused_as_by_verl() -> None:
    import torch

    from seamless_verl.agent_loops.queue_columns import QueueColumns

    with pytest.raises(RuntimeError):
        QueueColumns([{"a": torch.ones(2)}, {"a": torch.ones(2, 2)}])


def test_another_storage_gets_verls_tensordict(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    from seamless_verl.agent_loops import queue_columns

    client = SimpleNamespace(storage_manager=SimpleNamespace())
    monkeypatch.setattr(queue_columns, "get_client", lambda: client)
    assert queue_columns.columns_of_storage() is list_of_dict_to_tensordict
