"""How a version of the weights is committed: staged beside the replicas while they generate, then loaded into a
few of them at a time, while the others go on.

A replica stands still from `begin_sync` to `synced`, which is one load from its host's memory. Its calls are
frozen in the engine meanwhile and go on under the new weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

from seamless_verl.trainer.servers import PlacedReplica
from seamless_verl.trainer.workers import SeamlessReplicaWorker

_worker = ray.remote(SeamlessReplicaWorker)


class Transfer(CheckpointEngineManager):  # type: ignore[misc]
    """verl's transfer to standalone replicas, into the memory of their workers and no further."""

    def stage(self, version: int) -> dict[str, Any]:
        """Send what the trainer has staged; returns the senders' metrics."""
        rollout = group_of([worker for replica in self.replicas for worker in replica.workers])
        self.build_process_group(rollout)
        sent = self.actor_wg.send_staged(version)
        results = ray.get([*sent, *rollout.stage_weights(version)])
        finalize = [
            group.execute_checkpoint_engine(["finalize"] * group.world_size) for group in (self.actor_wg, rollout)
        ]
        ray.get([reply for replies in finalize for reply in replies])
        return {name: value for result in results[: len(sent)] for name, value in (result or {}).items()}


@dataclass
class WeightCommit:
    """`at_once` replicas stand still together; `transfer` reaches those on devices of their own. With `released`
    those on the trainer's devices have put their memory away, and take the weights straight from the engine."""

    plane: Any
    trainers: RayWorkerGroup
    replicas: Sequence[PlacedReplica]
    transfer: Transfer | None
    at_once: int = 1
    released: bool = False
    syncing: Callable[[Sequence[str]], AbstractContextManager[None]] = lambda devices: nullcontext()

    def __call__(self, version: int) -> dict[str, Any]:
        """Commit `version`; returns metrics, times in seconds.

        Raises:
            ReplicaLostError: no replica serves afterwards.
        """
        began = time.monotonic()
        metrics = self.stage(version)
        staged = time.monotonic()
        ray.get(self.plane.commit.remote(version))
        still = [self.standing_still(some, version) for some in self.rounds()]
        metrics["seamless/commit/stage_s"] = staged - began
        metrics["seamless/commit/load_s"] = time.monotonic() - staged
        metrics["seamless/commit/standstill_max_s"] = max(still, default=0.0)
        return metrics | ray.get(self.plane.settle.remote())

    def stage(self, version: int) -> dict[str, Any]:
        if self.transfer is not None or not self.released:
            self.trainers.stage_weights(version)
        return self.transfer.stage(version) if self.transfer else {}

    def rounds(self) -> list[list[PlacedReplica]]:
        """Who is loaded together: all that come back from the trainer, then a few of the others at a time."""
        back = [one for one in self.replicas if one.shares_device and self.released]
        others = [one for one in self.replicas if one not in back]
        few = [others[begin : begin + self.at_once] for begin in range(0, len(others), self.at_once)]
        return [back, *few] if back else few

    def standing_still(self, some: Sequence[PlacedReplica], version: int) -> float:
        """Seconds that these replicas stood still for their load."""
        began = time.monotonic()
        with self.syncing([device for one in some for device in one.devices]):
            self.load(some, version)
        return time.monotonic() - began

    def load(self, some: Sequence[PlacedReplica], version: int) -> None:
        """Load into these replicas; one that cannot be is left STALE or DEAD."""
        ids = [one.replica_id for one in some]
        ray.get(self.plane.returned.remote(ids))
        standing = set(ray.get(self.plane.begin_sync.remote(ids)))
        for replica_ids, replies in self.loads([one for one in some if one.replica_id in standing], version):
            try:
                ray.get(replies)
            except ray.exceptions.RayError as error:  # these replicas' trouble; the others serve on
                ray.get(self.plane.sync_failed.remote(replica_ids, str(error)))
                standing.difference_update(replica_ids)
        ray.get(self.plane.synced.remote(sorted(standing), version))

    def loads(self, some: Sequence[PlacedReplica], version: int) -> list[tuple[list[str], list[Any]]]:
        """Replicas, and the replies that say they are loaded; all begun."""
        if self.released and some and some[0].shares_device:
            replies = self.trainers.update_weights(global_steps=version, mode="naive")
            return [([one.replica_id for one in some], list(replies))]
        return [([one.replica_id], self.load_one(one, version)) for one in some]

    def load_one(self, one: PlacedReplica, version: int) -> list[Any]:
        if one.shares_device:
            return list(self.trainers.load_staged(version, one.replica.replica_rank))
        return list(group_of(one.replica.workers).load_staged(version))


def group_of(workers: Sequence[Any]) -> RayWorkerGroup:
    """These actors as a group, to be called together."""
    return RayWorkerGroup(worker_handles=list(workers), ray_cls_with_init=RayClassWithInitArgs(cls=_worker))
