"""The actor classes of the `seamless` trainer, and the weights that wait in them for their replica.

A version of the weights is staged first, while replicas generate, and then loaded from memory, so that a
replica stands still only for the load. Owned state of each process: the last version staged in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.engine_workers import TrainingWorker
from verl.workers.rollout.utils import ensure_async_iterator

from seamless_verl.resources.ledger import Activity, Kind
from seamless_verl.trainer.device_time import TakenThere, note_computations, train_device
from seamless_verl.trainer.sending import bound_transfers
from seamless_verl.trainer.tag_workers import TagWorkers


@dataclass(frozen=True)
class Staged:
    """One version's weights on the host, by their names in the HF format; `peft` is verl's config of an adapter."""

    version: int
    weights: list[tuple[str, torch.Tensor]]
    peft: Any = None

    def of(self, version: int) -> Staged:
        assert self.version == version, f"version {version} is asked for, {self.version} is staged"
        return self


class SeamlessActorWorker(DetachActorWorker):
    """Actor, rollout and reference on one device; it can also keep several versions of its weights."""

    staged: Staged | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound_transfers()
        super().__init__(*args, **kwargs)
        self.activity = Activity(f"trainer-{self.rank}", [train_device(self.rank)])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        for worker in (getattr(self, "actor", None), getattr(self, "ref", None)):
            if worker is not None:
                note_computations(worker, self.activity)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_activity(self) -> TakenThere:
        """What the device did since the last time."""
        return TakenThere.of(self.activity)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stage_weights(self, version: int) -> None:
        """Copy the weights out of the engine, which all ranks do together; those without a reader keep nothing."""
        with self.activity.doing(Kind.SYNC):
            self._stage(version)

    def _stage(self, version: int) -> None:
        reads = "rollout" in self.role
        options = {"layered_summon": self.layered_summon, "base_sync_done": True} if reads else {}
        weights, peft = self.actor.engine.get_per_tensor_param(**options)
        keep = reads or torch.distributed.get_rank() == 0
        copies = [(name, on_host(weight)) for name, weight in weights if keep]
        if self.actor.engine.is_param_offload_enabled:
            self.actor.engine.to("cpu", model=True, optimizer=False, grad=False)
        self.staged = Staged(version, copies, peft)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def send_staged(self, version: int) -> Any:
        """Rank 0 sends what is staged to the standalone replicas' workers; returns the transfer's metrics."""
        assert self.staged is not None
        return await self.checkpoint_engine.send_weights(iter(self.staged.of(version).weights), global_steps=version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def load_staged(self, version: int, replica_rank: int) -> None:
        """The ranks of that replica load what is staged into its engine; the others have nothing to do."""
        if self.rollout.replica_rank != replica_rank:
            return
        assert self.staged is not None
        staged = self.staged.of(version)
        kind = {} if staged.peft is None else {"peft_config": staged.peft, "base_sync_done": True}
        await self.rollout.update_weights(iter(staged.weights), global_steps=version, **kind)


class SeamlessReplicaWorker(CheckpointEngineWorker):  # type: ignore[misc]
    """Beside an engine on a device of its own: receives weights while the engine generates."""

    staged: Staged | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound_transfers()
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def stage_weights(self, version: int) -> None:
        received = self.checkpoint_engine.receive_weights(global_steps=version)
        copies = [(name, on_host(weight)) async for name, weight in ensure_async_iterator(received)]
        self.staged = Staged(version, copies)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def load_staged(self, version: int) -> None:
        assert self.staged is not None
        await self.server_adapter.update_weights(iter(self.staged.of(version).weights), global_steps=version)


def on_host(weight: torch.Tensor) -> torch.Tensor:
    """A copy that later updates of the original do not reach."""
    return weight.detach().to("cpu", copy=True)


class SeamlessCriticWorker(TrainingWorker):
    """A critic whose model config may register engines, as the actor's does."""

    def __init__(self, config: Any) -> None:
        import_external_libs(config.model_config.external_lib)
        super().__init__(config)
        self.activity = Activity(f"critic-{self.rank}", [train_device(self.rank)])
        note_computations(self, self.activity)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_activity(self) -> TakenThere:
        """What the device did since the last time."""
        return TakenThere.of(self.activity)


class SeamlessWorkerGroup(TagWorkers, RayWorkerGroup):
    """The processes of one resource pool; says when they exist, before any of them builds a model."""

    on_spawn: Callable[[dict[str, RayWorkerGroup]], None] | None = None  # set by the trainer for one set-up

    def spawn(self, prefix_set: Any) -> dict[str, RayWorkerGroup]:
        groups: dict[str, RayWorkerGroup] = super().spawn(prefix_set)
        if SeamlessWorkerGroup.on_spawn is not None:
            SeamlessWorkerGroup.on_spawn(groups)
        return groups
