"""A data plane's state is written beside its event loop, in order, however long Ray's store takes."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from seamless_verl.data_plane import restart
from seamless_verl.data_plane.restart import NAMESPACE, StateStore


class SlowStore:
    """Ray's key-value store, which answers when it is let."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.written: list[Any] = []
        self.answers = threading.Event()

    def put(self, key: str, value: bytes, *, overwrite: bool, namespace: str) -> None:
        assert overwrite and namespace == NAMESPACE and self.answers.wait(30)
        self.values[key] = value
        self.written.append(cloudpickle.loads(value))

    def get(self, key: str, *, namespace: str) -> bytes | None:
        return self.values.get(key)

    def delete(self, key: str, *, namespace: str) -> None:
        self.values.pop(key, None)


@pytest.fixture
def kv(monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    kv = SlowStore()
    own = SimpleNamespace(_internal_kv_put=kv.put, _internal_kv_get=kv.get, _internal_kv_del=kv.delete)
    monkeypatch.setattr(restart, "internal_kv", own)
    monkeypatch.setattr(restart.ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01"))
    return kv


async def test_the_event_loop_goes_on_while_ray_does_not_answer(kv: SlowStore) -> None:
    store, value = StateStore("plane"), {"committed": 1}
    putting = asyncio.create_task(store.put(value))
    await asyncio.sleep(0)
    value["committed"] = 2  # after it was asked to store it
    for _ in range(3):
        await asyncio.sleep(0.01)
    assert not putting.done() and store.get() is None
    kv.answers.set()
    await putting
    assert store.get() == {"committed": 1}


async def test_a_later_value_is_stored_after_an_earlier_one_also_of_a_task_that_was_cancelled(kv: SlowStore) -> None:
    store = StateStore("plane")
    tasks = [asyncio.create_task(store.put(number)) for number in range(4)]
    await asyncio.sleep(0)
    for task in tasks[:2]:  # of which the first is being written
        task.cancel()
    kv.answers.set()
    await asyncio.wait(tasks)
    assert store.get() == 3
    assert kv.written == sorted(kv.written) and kv.written[-2:] == [2, 3]


async def test_nothing_is_left_after_the_end(kv: SlowStore) -> None:
    store = StateStore("plane")
    putting = asyncio.create_task(store.put(1))
    await asyncio.sleep(0)
    clearing = asyncio.create_task(store.clear())
    await asyncio.sleep(0.01)
    assert not clearing.done()
    kv.answers.set()
    await asyncio.gather(putting, clearing)
    await store.put(2)  # of a command that ends late
    await store.clear()
    assert store.get() is None and kv.written == [1]
