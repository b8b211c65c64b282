"""vLLM's own allocator, over a driver that only counts: the cache alone is put away, and mapped again by its tag."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vllm.device_allocator.cumem as cumem
from support.hosts import VLLM
from vllm.device_allocator import AllocationData

from seamless_verl.platform import vllm_versions

HANDLES = {"weights": (0, 100, 1000, 1), "kv_cache": (0, 200, 2000, 2)}


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An allocator with one piece of memory for each tag; `mapped` are the sizes of those on the device."""
    one = object.__new__(cumem.CuMemAllocator)
    one.mapped = {handle[1] for handle in HANDLES.values()}
    one.pointer_to_data = {handle[2]: AllocationData(handle, tag) for tag, handle in HANDLES.items()}
    monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: one.mapped.remove(handle[1]))
    monkeypatch.setattr(cumem, "create_and_map", lambda handle: one.mapped.add(handle[1]))
    monkeypatch.setattr(vllm_versions, "get_mem_allocator_instance", lambda: one)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_: None)
    return one


def test_only_the_memory_of_a_tag_is_put_away_and_mapped_again(allocator: Any) -> None:
    vllm_versions.discard_memory("kv_cache")
    assert allocator.mapped == {100}
    allocator.wake_up(["kv_cache"])
    assert allocator.mapped == {100, 200}
    vllm_versions.discard_memory("kv_cache")
    assert allocator.mapped == {100}, "a second time does as the first"


def test_the_newer_version_puts_a_tag_away_by_itself() -> None:
    assert hasattr(cumem.CuMemAllocator, "discard") is (VLLM != "0.24")
