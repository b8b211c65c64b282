"""Transfers weights to the hosts of standalone replicas, and, with a time limit, to engines on the trainer's host.

verl's sender to an engine on its host waits for a receipt of each bucket. An engine that was killed meanwhile sends
none, and verl would wait for ever, in a call that blocks the whole process. The sender here raises TimeoutError, and
the trainer continues without that replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import zmq
from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.workers.rollout.utils import ensure_async_iterator
from verl.workers.rollout.vllm_rollout import vllm_rollout
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from seamless_verl.errors import HostMovedError
from seamless_verl.platform.adaptation import WRITTEN_FOR
from seamless_verl.weights.staging import StagedWeights, StagingMemory, one_per_host

SENDER = BucketedWeightSender.__name__


class BoundedSender(BucketedWeightSender):  # type: ignore[misc]
    """verl's sender, which gives up if the engine does not take a bucket within `bucket_timeout_s` seconds."""

    bucket_timeout_s = 300.0

    async def async_send_weights(self, weights: Any) -> None:
        """Raises TimeoutError when the engine does not take a bucket."""
        try:
            await super().async_send_weights(weights)
        except zmq.Again as late:
            raise TimeoutError(f"the engine has taken no weights for {self.bucket_timeout_s:g} s") from late

    def _init_socket(self) -> None:
        super()._init_socket()
        for option in (zmq.SNDTIMEO, zmq.RCVTIMEO):
            self.socket.setsockopt(option, int(1000 * self.bucket_timeout_s))
        self.socket.setsockopt(zmq.LINGER, 0)


def bound_transfers() -> None:
    """Makes every load of this process use the bounded sender.

    Raises:
        HostMovedError: verl's rollout has another sender.
    """
    if SENDER not in vars(vllm_rollout):
        raise HostMovedError("bounded-transfers", f"{vllm_rollout.__name__}:{SENDER}", WRITTEN_FOR, "no such name")
    setattr(vllm_rollout, SENDER, BoundedSender)


class SeamlessReplicaWorker(CheckpointEngineWorker):  # type: ignore[misc]
    """Runs beside an engine on a device of its own, and receives weights while the engine generates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.staged = StagingMemory(node_id())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def stage_weights(self, version: int) -> StagedWeights:
        self.staged.begin()
        async for name, weight in ensure_async_iterator(self.checkpoint_engine.receive_weights(global_steps=version)):
            self.staged.add(name, weight)
        return self.staged.end(version)


_worker = ray.remote(SeamlessReplicaWorker)


class Transfer(CheckpointEngineManager):  # type: ignore[misc]
    """verl's transfer to standalone replicas, which ends in the memory of their hosts."""

    def stage(self, version: int) -> tuple[list[StagedWeights], dict[str, Any]]:
        """Sends what the trainer has staged; returns what the replicas' hosts then have staged, and metrics."""
        rollout = group_of([worker for replica in self.replicas for worker in replica.workers])
        self.build_process_group(rollout)
        sent = self.actor_wg.send_staged(version)
        results = ray.get([*sent, *rollout.stage_weights(version)])
        finalize = [
            group.execute_checkpoint_engine(["finalize"] * group.world_size) for group in (self.actor_wg, rollout)
        ]
        ray.get([reply for replies in finalize for reply in replies])
        metrics = {name: value for result in results[: len(sent)] for name, value in (result or {}).items()}
        return one_per_host(results[len(sent) :]), metrics


def group_of(workers: Sequence[Any]) -> RayWorkerGroup:
    """A worker group of these actors."""
    return RayWorkerGroup(worker_handles=list(workers), ray_cls_with_init=RayClassWithInitArgs(cls=_worker))


def node_id() -> str:
    """Ray's name for this host."""
    return str(ray.get_runtime_context().get_node_id())
