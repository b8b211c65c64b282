"""A KV connector for tests: a folder of KV blocks by their hashes, beside an engine's cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

FOLDER = "folder"  # in kv_connector_extra_config


@dataclass
class Blocks(KVConnectorMetadata):
    """Files and the cache's blocks that belong to them: to read before a step, and to write after it."""

    load: list[tuple[str, int]] = field(default_factory=list)
    save: list[tuple[str, int]] = field(default_factory=list)


class LastingStore(KVConnectorBase_V1):
    """Keeps all blocks for ever."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.folder = Path(vllm_config.kv_transfer_config.kv_connector_extra_config[FOLDER])
        self.size = vllm_config.cache_config.block_size
        self.caches: dict[str, torch.Tensor] = {}
        self.scheduled: dict[str, tuple[Any, Any]] = {}
        self.load: list[tuple[str, int]] = []

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def block(self, layer: str, number: int) -> torch.Tensor:
        cache = self.caches[layer]
        return cache.select(1 if cache.shape[0] == 2 else 0, number)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, number in self._get_connector_metadata().load:
            for layer, stored in torch.load(self.folder / name).items():
                self.block(layer, number).copy_(stored)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        for name, number in self._get_connector_metadata().save:
            torch.save({layer: self.block(layer, number).clone() for layer in self.caches}, self.folder / name)

    # In the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        begin, found = num_computed_tokens // self.size, 0
        for name in names(request)[begin : (request.num_tokens - 1) // self.size]:
            if not (self.folder / name).exists():
                break
            found += 1
        return found * self.size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        numbers = blocks.get_block_ids()[0]
        self.scheduled[request.request_id] = request, numbers
        begin = request.num_computed_tokens // self.size
        stored = range(begin, begin + num_external_tokens // self.size)
        self.load += [(names(request)[i], numbers[i]) for i in stored]

    def build_connector_meta(self, scheduler_output: Any) -> Blocks:
        loaded, made = {number for _, number in self.load}, Blocks(self.load)
        for request, numbers in self.scheduled.values():
            pairs = zip(names(request)[: request.num_tokens // self.size], numbers, strict=False)
            made.save += [pair for pair in pairs if pair[1] not in loaded]
        self.scheduled, self.load = {}, []
        return made


class Store(LastingStore):
    """Forgets all blocks with the cache."""

    def reset_cache(self) -> bool:
        for path in self.folder.iterdir():
            path.unlink()
        return True


class TieredStore(LastingStore):
    """Keeps its blocks at a reset, as the slow tier of vLLM's tiered offloading does."""

    def reset_cache(self) -> bool:
        return True


def names(request: Any) -> list[str]:
    return [bytes(one).hex() for one in request.block_hashes]
