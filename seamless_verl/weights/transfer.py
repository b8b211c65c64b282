"""Transfers weights to the hosts of standalone replicas that have none in their memory; their engines generate
meanwhile.

A replica on a host where the trainer has staged the weights maps them there. To the other hosts verl's checkpoint
engine sends them, to all at once; each keeps one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.workers.rollout.utils import ensure_async_iterator

from seamless_verl.weights.staging import StagedWeights, StagingMemory, one_per_host


class SeamlessReplicaWorker(CheckpointEngineWorker):  # type: ignore[misc]
    """Runs beside an engine on a device of its own, and receives weights while the engine generates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.staged = StagingMemory(node_id())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def node(self) -> str:
        """The Ray node it runs on."""
        return node_id()

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    async def stage_weights(self, version: int, keeps: bool) -> StagedWeights | None:
        """Receives the weights, and `keeps` them in the host's memory; one worker of each host does."""
        if keeps:
            self.staged.begin()
        async for name, weight in ensure_async_iterator(self.checkpoint_engine.receive_weights(global_steps=version)):
            if keeps:
                self.staged.add(name, weight)
                self.staged.copies.finish()  # the engine receives into the same memory again
        return self.staged.end(version) if keeps else None


_worker = ray.remote(SeamlessReplicaWorker)


class Transfer(CheckpointEngineManager):  # type: ignore[misc]
    """verl's transfer to standalone replicas, which ends in the memory of their hosts."""

    nodes: list[str] | None = None  # of the replicas' workers, in their order

    @property
    def workers(self) -> list[Any]:
        """The workers of all replicas, in their order."""
        return [worker for replica in self.replicas for worker in replica.workers]

    def without(self, hosts: set[str]) -> list[int]:
        """The places of those workers that are on none of these hosts, which have the weights."""
        self.nodes = self.nodes or list(group_of(self.workers).node())
        return without_weights(self.nodes, hosts)

    def stage(self, version: int, staged: Sequence[StagedWeights]) -> tuple[list[StagedWeights], dict[str, Any]]:
        """Sends what the trainer has `staged` to the hosts that have nothing of it.

        Returns what these then have staged, and the transfer's metrics.
        """
        without = self.without({weights.host for weights in staged})
        if not without:
            return [], {}
        assert self.nodes is not None
        rollout = group_of([self.workers[i] for i in without])
        self.build_process_group(rollout)
        keeps = first_of_each([self.nodes[i] for i in without])
        sent = self.actor_wg.send_staged(version, staged)
        results = ray.get([*sent, *rollout.stage_weights([version] * len(without), keeps)])
        finalize = [
            group.execute_checkpoint_engine(["finalize"] * group.world_size) for group in (self.actor_wg, rollout)
        ]
        ray.get([reply for replies in finalize for reply in replies])
        metrics = {name: value for result in results[: len(sent)] for name, value in (result or {}).items()}
        return one_per_host(results[len(sent) :]), metrics


def without_weights(nodes: Sequence[str], having: set[str]) -> list[int]:
    """The places in `nodes` of those that have no weights."""
    return [i for i, node in enumerate(nodes) if node not in having]


def first_of_each(nodes: Sequence[str]) -> list[bool]:
    """For each place whether it is the first one of its node."""
    return [node not in nodes[:i] for i, node in enumerate(nodes)]


def group_of(workers: Sequence[Any]) -> RayWorkerGroup:
    """A worker group of these actors."""
    return RayWorkerGroup(worker_handles=list(workers), ray_cls_with_init=RayClassWithInitArgs(cls=_worker))


def node_id() -> str:
    """Ray's name for this host."""
    return str(ray.get_runtime_context().get_node_id())
