"""Transfers weights to hosts of standalone replicas that have none in their memory; their engines generate meanwhile.

verl's checkpoint engine sends them, to all of these hosts at once; each keeps one copy, which its replicas map.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.workers.rollout.utils import ensure_async_iterator

from seamless_verl.errors import shorten
from seamless_verl.runtime.actor_death import ACTOR_GONE, death_reason
from seamless_verl.weights.staging import StagedWeights, StagingMemory, one_per_host

logger = logging.getLogger(__name__)
UNREACHABLE_S = 60.0  # Ray takes a node for dead after some 15 s without a reply
RETRY_S = 0.5


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
    """verl's transfer to standalone replicas, which ends in the memory of their hosts.

    Owned state: the node of each worker that said it once, as a worker does not move; and the worker that keeps the
    copy of a node that weights were sent to. The copy ends with it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.nodes: dict[Any, str] = {}
        self.keepers: dict[str, Any] = {}

    def without(self, hosts: set[str]) -> list[tuple[Any, str]]:
        """The workers, with their nodes, of living replicas that are on none of these hosts, which have the weights.

        Workers that are known to be on these hosts are not asked: nothing is sent to them, whether they live or not.
        """
        return without_weights(self.living(but_on=hosts), hosts)

    def stage(self, version: int, staged: Sequence[StagedWeights]) -> tuple[list[StagedWeights], dict[str, Any]]:
        """Sends what is `staged` to the hosts of living replicas that have nothing of it, or no longer.

        Returns what these then have, and the transfer's metrics. A replica of which a worker has died gets nothing, and
        its servers are ended. Where one dies meanwhile, the transfer begins again without it.
        """
        while True:
            living = self.living()
            receivers = without_weights(living, self._still_kept({weights.host for weights in staged}, living))
            if not receivers:
                return [], {}
            try:
                return self._send(version, staged, receivers)
            except ray.exceptions.RayError as error:
                if self.living() == living:
                    raise
                logger.warning("a replica died in a transfer of weights, which begins again: %s", shorten(error))

    def _still_kept(self, hosts: set[str], living: Sequence[Sequence[tuple[Any, str]]]) -> set[str]:
        """These hosts without those whose copy ended with the worker that kept it; the trainer's own have none."""
        workers = {worker for replica in living for worker, _ in replica}
        return {host for host in hosts if host not in self.keepers or self.keepers[host] in workers}

    def living(self, but_on: Collection[str] = ()) -> list[list[tuple[Any, str]]]:
        """The workers with their nodes, of each replica all of whose workers live. Those on `but_on` are not asked."""
        asked = [  # the servers first, and before any reply: the trainer's thread may put others in their place
            (
                list(replica.servers),
                [(one, None if self.nodes.get(one) in but_on else one.node.remote()) for one in replica.workers],
            )
            for replica in self.replicas
        ]
        deadline = time.monotonic() + UNREACHABLE_S
        found = []
        for servers, replies in asked:
            nodes = {
                worker: self.nodes[worker] if reply is None else node_of(worker, reply, deadline)
                for worker, reply in replies
            }
            known = [(worker, node) for worker, node in nodes.items() if node is not None]
            self.nodes.update(known)
            if len(known) == len(nodes):
                found.append(known)
                continue
            for server in servers:  # it can get no weights any more
                ray.kill(server)
        return found

    def _send(
        self, version: int, staged: Sequence[StagedWeights], receivers: Sequence[tuple[Any, str]]
    ) -> tuple[list[StagedWeights], dict[str, Any]]:
        """Sends to these workers, each with its node, all at once."""
        rollout = group_of([worker for worker, _ in receivers])
        self.build_process_group(rollout)
        nodes = [node for _, node in receivers]
        keeps = [node not in nodes[:i] for i, node in enumerate(nodes)]  # the first worker of each
        sent = self.actor_wg.send_staged(version, staged)
        replies = [*sent, *rollout.stage_weights([version] * len(receivers), keeps)]
        ray.wait(replies, num_returns=len(replies))  # none may still use the group when the transfer begins again
        results = ray.get(replies)
        finalize = [
            group.execute_checkpoint_engine(["finalize"] * group.world_size) for group in (self.actor_wg, rollout)
        ]
        ray.get([reply for ended in finalize for reply in ended])
        self.keepers |= {node: worker for (worker, node), kept in zip(receivers, keeps, strict=True) if kept}
        metrics = {name: value for result in results[: len(sent)] for name, value in (result or {}).items()}
        kept = one_per_host(results[len(sent) :])
        own = next((one for one in staged if one.peft is not None or one.seal is not None), None)
        # An adapter's config goes with its weights, and with every copy the seal of what the trainer had.
        return kept if own is None else [replace(one, peft=own.peft, seal=own.seal) for one in kept], metrics


def node_of(worker: Any, reply: Any, deadline: float) -> str | None:
    """The node of a worker that was asked for it; None if the worker is lost.

    A node that does not reply is dead, or reachable again, as soon as Ray knows. A process that is stopped gives
    neither a reply nor an error: it is lost at the deadline, a monotonic time.

    Raises:
        ActorUnavailableError: its node is neither at the deadline.
    """
    while True:
        try:
            return str(ray.get(reply, timeout=max(0.0, deadline - time.monotonic())))
        except ray.exceptions.GetTimeoutError:
            logger.warning("a worker beside an engine does not reply, and is lost: %s", worker)
            return None
        except ray.exceptions.ActorUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)  # Ray notifies of no network that is whole again
            reply = worker.node.remote()
        except ACTOR_GONE as error:
            logger.warning("a worker beside an engine is dead: %s", shorten(death_reason(error)))
            return None


def without_weights(replicas: Sequence[Sequence[tuple[Any, str]]], having: set[str]) -> list[tuple[Any, str]]:
    """Of these replicas' workers, each with its node, those whose nodes have no weights."""
    return [(worker, node) for replica in replicas for worker, node in replica if node not in having]


def group_of(workers: Sequence[Any]) -> RayWorkerGroup:
    """A worker group of these actors."""
    return RayWorkerGroup(worker_handles=list(workers), ray_cls_with_init=RayClassWithInitArgs(cls=_worker))


def node_id() -> str:
    """Ray's name for this host."""
    return str(ray.get_runtime_context().get_node_id())
