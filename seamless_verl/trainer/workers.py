"""The actor classes of the `seamless` trainer: verl's workers, which also stage weights and report their activity.

A version of the weights is staged while replicas generate, and then loaded from memory, so that a replica pauses only
for the load. Owned state of each process: the version that it has staged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.engine_workers import TrainingWorker

from seamless_verl.resources.ledger import Activity, DeviceUse, NodeActivity
from seamless_verl.trainer.device_time import record_computations, train_device
from seamless_verl.trainer.pools import TagWorkers
from seamless_verl.weights.staging import StagedWeights, StagingMemory
from seamless_verl.weights.transfer import bound_transfers, node_id


class SeamlessActorWorker(DetachActorWorker):
    """Actor, rollout and reference on one device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound_transfers()
        super().__init__(*args, **kwargs)
        self.staged = StagingMemory(node_id())
        self.activity = Activity(f"trainer-{self.rank}", [train_device(self.rank)])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        for worker in (getattr(self, "actor", None), getattr(self, "ref", None)):
            if worker is not None:
                record_computations(worker, self.activity)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_activity(self) -> NodeActivity:
        """The activity of the device since the last report."""
        return NodeActivity(self.activity.take(), node_id())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stage_weights(self, version: int) -> StagedWeights | None:
        """Copies the weights out of the engine, for replicas to map or to receive; all ranks call it together."""
        options = {"layered_summon": self.layered_summon, "base_sync_done": True} if "rollout" in self.role else {}
        with self.activity.doing(DeviceUse.SYNC):
            weights, peft = self.actor.engine.get_per_tensor_param(**options)
            keeps = first_of_host() if options else self.rank == 0
            if keeps:
                self.staged.begin()
            for name, weight in weights:
                if keeps:
                    self.staged.add(name, weight)
            if self.actor.engine.is_param_offload_enabled:
                self.actor.engine.to("cpu", model=True, optimizer=False, grad=False)
            return self.staged.end(version, peft) if keeps else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def send_staged(self, version: int) -> Any:
        """Rank 0 sends the staged weights to the standalone replicas' workers; returns the transfer's metrics."""
        weights = iter(self.staged.get(version).map()) if self.rank == 0 else iter(())
        return await self.checkpoint_engine.send_weights(weights, global_steps=version)


def first_of_host() -> bool:
    """Whether this rank is the first one on its host; all ranks call it together."""
    hosts = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(hosts, node_id())
    return hosts.index(node_id()) == torch.distributed.get_rank()


class SeamlessCriticWorker(TrainingWorker):
    """A critic whose model config may register engines, as the actor's does."""

    def __init__(self, config: Any) -> None:
        import_external_libs(config.model_config.external_lib)
        super().__init__(config)
        self.activity = Activity(f"critic-{self.rank}", [train_device(self.rank)])
        record_computations(self, self.activity)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_activity(self) -> NodeActivity:
        """The activity of the device since the last report."""
        return NodeActivity(self.activity.take(), node_id())


class SeamlessWorkerGroup(TagWorkers, RayWorkerGroup):
    """The workers of one resource pool; calls `on_spawn` when their processes exist, before any builds a model."""

    on_spawn: Callable[[dict[str, RayWorkerGroup]], None] | None = None  # set by the trainer for one set-up

    def spawn(self, prefix_set: Any) -> dict[str, RayWorkerGroup]:
        groups: dict[str, RayWorkerGroup] = super().spawn(prefix_set)
        if SeamlessWorkerGroup.on_spawn is not None:
            SeamlessWorkerGroup.on_spawn(groups)
        return groups
