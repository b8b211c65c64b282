"""The processes of the bench: ranks of a trainer that only stages, and replicas whose engines have no model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import ray
import torch

from seamless_verl.replica.load_plan import PlanCache
from seamless_verl.replica.seal import ResidentSeal
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.observation import CacheUse
from seamless_verl.tools.bench.stub_engine import StubEngine
from seamless_verl.transport import EngineServer, serve_engine
from seamless_verl.weights.background import BackgroundStaging, StagingBegun, StagingEnd
from seamless_verl.weights.seal import SealMode
from seamless_verl.weights.staging import (
    MappedMemory,
    StagedWeights,
    StagingMemory,
    StagingPlace,
    StagingShare,
    map_on_this_host,
)

LAYERS, MATRICES, WIDTH = 12, 7, 128
DTYPE = torch.bfloat16
HOST = "this host"
STAGING = "staging"  # a concurrency group, as of the trainer's workers
Weights = list[tuple[str, torch.Tensor]]


def named_weights(parameters: int) -> Weights:
    """Weights of a model of about this size: matrices [rows, WIDTH], bfloat16."""
    rows = max(1, parameters // (LAYERS * MATRICES * WIDTH))
    return [(f"layer_{i}_{j}", torch.zeros(rows, WIDTH, dtype=DTYPE)) for i in range(LAYERS) for j in range(MATRICES)]


class BenchTrainer:
    """A rank of the trainer."""

    def __init__(self) -> None:
        self.weights: Weights = []
        self.staged, self.copying = StagingMemory(HOST), BackgroundStaging()

    def set_up(self, parameters: int) -> None:
        self.staged.close()
        self.weights = named_weights(parameters)

    def set_seal(self, seal: SealMode) -> None:
        self.staged.seal = seal

    def begin(self, ranks: int) -> StagingPlace:
        return self.staged.begin(ranks)

    def stage(
        self, version: int, place: StagingPlace | None, index: int, ranks: int, in_background: bool
    ) -> StagedWeights | StagingShare | StagingBegun:
        """As the trainer's workers do it; one rank alone begins by itself, as theirs do among themselves."""
        place = place or self.begin(ranks)
        if not in_background:
            return self.write(version, place, index, ranks)
        self.copying.start(partial(self.write, version, place, index, ranks))
        return StagingBegun(HOST)

    def write(self, version: int, place: StagingPlace, index: int, ranks: int) -> StagedWeights | StagingShare:
        """Stages this rank's share."""
        if index:
            self.staged.join(place, index, ranks)
        for name, weight in self.weights:
            self.staged.add(name, weight)
        staged = self.staged.end(version)
        sealed = b"" if staged.seal is None else staged.seal.rows
        return StagingShare(HOST, staged.layout, sealed) if index else staged

    @ray.method(concurrency_group=STAGING)  # type: ignore[untyped-decorator]
    def finish(self) -> StagingEnd:
        return self.copying.result()

    def step(self, value: float) -> None:
        """Changes the weights, as an optimizer does."""
        self.copying.wait()
        for _, weight in self.weights:
            weight.fill_(value)


class BenchServer:
    """A replica's server; its engine has parameters, and no model that computes with them."""

    engine_server: EngineServer

    def __init__(self, rank: int) -> None:
        self.name = f"replica-{rank}"
        self.engine = StubEngine(self.name)
        self.set_up(0)

    def set_up(self, parameters: int) -> None:
        self.model = torch.nn.ParameterDict(dict(named_weights(parameters)))
        self.model.requires_grad_(False)
        self.memory, self.plan, self.resident = MappedMemory(), PlanCache(), ResidentSeal(0)
        self.pause_s = self.cpu_s = 0.0

    async def listen(self, token: str, devices: Sequence[str], keep_kv: bool) -> tuple[str, int]:
        host = ray.util.get_node_ip_address()
        self.engine_server = await serve_engine(self.engine, host, 0, token=token, replica_id=self.name)
        return host, self.engine_server.port

    async def status(self) -> tuple[int, str | None]:
        return self.engine.version, None

    async def cache_use(self) -> CacheUse:
        return CacheUse()

    async def pause(self, mode: str) -> None:
        await self.engine.pause(PauseMode(mode))

    async def resume(self) -> None:
        await self.engine.resume()

    async def update_weights(self, version: int, weights: Sequence[StagedWeights]) -> None:
        """Maps, pauses, loads and resumes, as a replica's server and its workers do it."""
        staged, mapped = map_on_this_host(weights, self.memory)
        self.resident.mapped(staged, mapped, self.memory, 1)
        began, cpu_began = time.monotonic(), time.thread_time()
        await self.engine.pause(PauseMode.KEEP)
        self.load(mapped)
        self.resident.copied(self.plan.plan, [self.model], staged, mapped)
        self.memory.check(staged)
        self.resident.loaded(self.plan.plan, staged, mapped)
        self.engine.version = version
        await self.engine.resume()
        self.cpu_s = time.thread_time() - cpu_began  # read first: it is a part of the pause
        self.pause_s = time.monotonic() - began

    def load(self, weights: Weights) -> None:
        if not self.plan.load(weights, [self.model]):
            with self.plan.recording([self.model]) as next_bucket:
                next_bucket(weights)
                for name, weight in weights:
                    self.model[name].data.copy_(weight)

    async def last_pause_s(self) -> float:
        return self.pause_s

    async def last_cpu_s(self) -> float:
        """The part of the last pause for which this process had a core."""
        return self.cpu_s

    async def values(self) -> set[float]:
        """The first, the middle and the last value of each parameter."""
        return {float(weight.flatten()[i]) for weight in self.model.values() for i in (0, weight.numel() // 2, -1)}
