"""A replica's server as the product has it, over an engine that is started without verl's configs and workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from verl.workers.config import RolloutConfig
from verl.workers.config.rollout import CheckpointEngineConfig
from verl.workers.rollout.replica import RolloutMode
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from seamless_verl.replica.server import SeamlessServer
from seamless_verl.replica.worker_extension import KV_CACHE, extension_name
from seamless_verl.weights.staging import StagedWeights, StagingMemory
from support.version_weights import Weights
from support.vllm_engine import Engine, environment, settings

SIZES = {"max_num_seqs": 64, "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}


class Server(SeamlessServer):
    """One engine on one core. Its door, its pauses, its sleep, its commits and its death are the product's."""

    lora_as_adapter = False

    def __init__(self, rank: int, model: str, core: int, host: str) -> None:
        os.environ.update(environment(str(rank), [core], [0]))
        self.replica_rank, self.node_rank, self.global_steps, self._server_address = rank, 0, None, host
        self.weights = Weights(Path(model))
        self.model, self.staged = Path(model), StagingMemory(host)
        bucket = CheckpointEngineConfig(update_weights_bucket_megabytes=16)
        self.config = RolloutConfig(name="vllm", checkpoint_engine=bucket, free_cache_engine=True)
        self.rollout_mode, self.updating = RolloutMode.HYBRID, asyncio.Lock()
        self.defects = list[str]()
        self.model_config = SimpleNamespace(processor=None)  # text only, as verl's has it for such a model

    async def launch(self) -> int:
        """Its process id, with the engine up."""
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**settings(self.model, **SIZES, worker_extension_cls=extension_name()))
        )
        return os.getpid()

    async def stage(self, version: int, *, gone: bool) -> StagedWeights:
        """The weights of a version in this host's memory; when `gone`, in memory that is there no more."""
        self.staged.begin()
        for name, weight in self.weights.of(version).items():
            self.staged.add(name, weight)
        staged = self.staged.end(version)
        if gone:
            self.staged.begin()
        return staged

    async def load(self, version: int) -> None:
        """The weights of a version, and the word that they are whole."""
        await self.take_memory()
        await self.receive(self.weights.of(version))
        await self.set_global_steps(version)

    async def spoil(self, version: int) -> None:
        """Half of the weights of a version, as when the sender dies."""
        weights = self.weights.of(version)
        await self.take_memory()
        await self.receive(dict(islice(weights.items(), len(weights) // 2)))
        raise ConnectionError("the sender died")

    async def take_memory(self) -> None:
        """What was put away is back without its contents; vLLM's wake schedules, so pause again."""
        if self.put_away - {KV_CACHE}:
            await self.wake_up(sorted(self.put_away - {KV_CACHE}))
        await self.take_cache()

    async def receive(self, weights: Mapping[str, torch.Tensor]) -> None:
        assert self.source is not None
        assert self.source.paused is not None or not self.source.in_flight, "loaded while it generates"
        with torch.no_grad():
            await Engine(self.engine, None, str(self.replica_rank)).update(weights, bucket_mb=16)

    async def update_weights(self, version: int, weights: Any) -> None:
        """One that fails for another reason than what an event did is on record."""
        try:
            await super().update_weights(version, weights)
        except Exception as error:
            if "this host has no weights in its memory" not in str(error):
                await self.engine.collective_rpc("clock")  # raises where it is because the engine dies
                self.defects.append(repr(error))
            raise

    async def hang_up(self) -> None:
        """Its connections break, as by a network that was away."""
        assert self.engine_server is not None
        for link in tuple(self.engine_server.connections):
            link.abandon("the network was away")

    async def processes(self) -> dict[str, int]:
        """Those of the engine, by what they are."""
        (worker,) = await self.engine.collective_rpc(lambda worker: os.getpid())
        (core,) = self.engine.engine_core.resources.engine_manager.processes
        return {"engine": core.pid, "worker": worker, "server": os.getpid()}

    async def left(self) -> tuple[int, int]:
        """Requests that its source has, and its engine, which has loaded whatever it could."""
        assert not self.defects, self.defects
        assert self.source is not None
        return len(self.source.in_flight), self.engine.output_processor.get_num_unfinished_requests()
