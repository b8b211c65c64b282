"""Launches the replicas of a job behind a load balancer that exists before them, and starts lost ones again.

verl starts the engines, then the load balancer, and only then its clients. Here the empty balancer comes first, so
that clients need not wait for the engines; replicas are added when they serve.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import ray
from omegaconf import DictConfig
from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group
from verl.utils.ray_utils import auto_await
from verl.workers.rollout import replica as replicas
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplica

from seamless_verl.agent_loops.llm_client import SeamlessClient
from seamless_verl.data_plane.client import PlacedReplica
from seamless_verl.errors import ReplicaLostError
from seamless_verl.platform.adaptation import rebound
from seamless_verl.resources.machines import describe_shortage
from seamless_verl.resources.tags import Layout
from seamless_verl.runtime.actor_death import ACTOR_GONE
from seamless_verl.runtime.process import BackgroundTask
from seamless_verl.trainer.device_time import rollout_device, train_device
from seamless_verl.trainer.pools import TagPools, cluster_nodes

logger = logging.getLogger(__name__)
STOP_S = 30.0
START_S = 1800.0  # for a lost replica's new engine, which reads a model from disk
TAKE_S = 300.0  # for the devices of a node that is there
ALIVE_S = 10.0  # for a worker, whose call waits while Ray does not know that its node is gone
ASK_S = 0.05  # between two questions whether an actor is dead
GONE_S = 60.0  # for Ray to say that an actor that was killed is dead, which frees its name


class SeamlessServers(LLMServerManager):
    """verl's manager in two steps, `open_balancer`, then `launch`, of replicas on the trainer's devices and then of
    others.

    `sharing` has the `workers` of the trainer whose devices generate, and their number as its `world_size`; `pools`
    places other replicas where machines have tags.
    """

    def __init__(
        self, config: DictConfig, layout: Layout, sharing: Any, replica_class: type, pools: TagPools | None
    ) -> None:
        self.rollout_replica_class = replica_class
        super().__init__(config, worker_group=sharing if layout.shares_devices else None)
        self.layout, self.pools = layout, pools
        self.taking = threading.Lock()  # of the name that is rebound while a replica takes devices

    def open_balancer(self) -> None:
        """Starts the balancer without replicas; clients can be made from then on."""
        self.server_addresses: list[str] = []
        self.server_handles: list[ray.actor.ActorHandle] = []
        auto_await(self._init_global_load_balancer)()

    def launch(self) -> SeamlessServers:
        """Starts every replica and adds it to the balancer; returns when all of them serve."""
        self.placed: list[PlacedReplica] = []
        if self.layout.shares_devices:
            self._launch(0, shares_device=True)
        if self.layout.has_own_devices:
            self.worker_group = None
            with self._own_pools():
                self._launch(len(self.placed), shares_device=False)
        self.rollout_replicas = [placed.replica for placed in self.placed]
        return self

    def _launch(self, start_rank: int, *, shares_device: bool) -> None:
        auto_await(self._initialize_llm_servers)(start_rank)
        servers = dict(zip(self.server_addresses, self.server_handles, strict=True))
        ray.get(self.global_load_balancer.add_servers.remote(servers))
        name = train_device if shares_device else rollout_device
        for i, replica in enumerate(self.rollout_replicas):
            devices = range(i * replica.world_size, (i + 1) * replica.world_size)
            self.placed.append(PlacedReplica(replica, shares_device, tuple(map(name, devices))))

    def missing_for(self, placed: PlacedReplica) -> str | None:
        """What a start of this lost replica waits for; None if it has devices. Any thread may call it.

        A replica on devices of its own gets those of another node if its own is gone, or has no room for it any more:
        a start that fails gives its devices back, and somebody else may take them.
        """
        if placed.shares_device or self.keeps_devices(placed):
            return None
        nodes = cluster_nodes()
        if self.pools is not None:
            missing = self.pools.move_replica(placed.replica.replica_rank, nodes)
            return f"{missing[0]}: {describe_shortage(missing[0], nodes)}" if missing else None
        replica = placed.replica
        places = sum(node.free // replica.gpus_per_replica_node for node in nodes)
        held = nodes_held_by(replica)
        if places >= replica.nnodes or (held and held <= {node.node_id for node in nodes}):
            return None
        return f"{replica.nnodes} x {replica.gpus_per_replica_node} free devices, each on one node"

    def keeps_devices(self, placed: PlacedReplica) -> bool:
        """Whether its node stays, and the processes that hold its devices live; one that is late to reply does."""
        stays = placed.replica_id not in self.leaving()
        return stays and not any(is_dead(worker, ALIVE_S) for worker in placed.replica.workers)

    def leave(self, placed: PlacedReplica) -> None:
        """Ends the replica and the processes that hold its devices, for a start on other ones."""
        end_actors(placed.replica.servers)
        self._release(placed.replica)

    def leaving(self) -> set[str]:
        """The replicas on devices of their own, placed by tags, of which a node is announced to leave."""
        if self.pools is None:
            return set()
        nodes = {node.node_id for node in cluster_nodes() if node.leaving}
        own = [placed for placed in self.placed if nodes and not placed.shares_device]
        return {placed.replica_id for placed in own if nodes & self.pools.nodes_of(placed.replica.replica_rank)}

    def start_again(self, placed: PlacedReplica) -> RolloutReplica:
        """Starts a server with its engine in the place of a lost one, which is ended first; any thread may call it.

        It is on the same devices, or on those that `missing_for` has found, if the processes that held them are gone.
        Returns the replica with the new server, for `replace`. A start that fails leaves no server.

        Raises:
            TimeoutError: the lost server did not end within `GONE_S`, or the start took more than `START_S`.
            ReplicaLostError: its devices are gone, and there are no others yet.
            ray.exceptions.RayError: the start failed.
        """
        end_actors(placed.replica.servers)
        replica: RolloutReplica = copy.copy(placed.replica)
        replica.servers = []
        try:
            if not placed.shares_device and not self.keeps_devices(placed):
                if (missing := self.missing_for(placed)) is not None:  # Ray knows only now that the node is gone
                    raise ReplicaLostError(placed.replica_id, f"its devices are gone, without others yet: {missing}")
                self._take_devices(replica)
            auto_await(launch_within)(replica, START_S)
        except BaseException:
            self.discard(placed, replica)
            raise
        return replica

    def _take_devices(self, replica: RolloutReplica) -> None:
        """Gives the replica a pool and workers of its own, as verl does before it launches the servers.

        Raises:
            TimeoutError: it took more than `TAKE_S`, as where the node goes away again. What was reserved is given
                back, with which what verl waits for ends.
        """
        self._release(replica)
        replica.workers, replica.resource_pool = [], None
        replica.launch_servers = do_nothing
        with self.taking, self._own_pools():
            taking = BackgroundTask("taking devices", auto_await(replica.init_standalone))
            try:
                taking.future.result(TAKE_S)  # verl waits without a bound for its first task on the new node
            except TimeoutError:
                remove_groups_of(replica)
                raise
        del replica.launch_servers  # not after an error: what is still taking devices then must launch nothing

    def _release(self, replica: RolloutReplica) -> None:
        """Gives a lost replica's devices back; it holds none until it is replaced by one that has started."""
        if self.pools is not None:
            self.pools.without_devices.add(replica.replica_rank)
        release_devices(replica)

    def discard(self, placed: PlacedReplica, started: RolloutReplica) -> None:
        """Ends a server that was started in vain, and gives devices back that were taken for it."""
        end_actors(started.servers)
        if started.workers is not placed.replica.workers:
            release_devices(started)

    def _own_pools(self) -> AbstractContextManager[None]:
        """In the block, replicas on devices of their own are placed by tags, where the run has them."""
        return rebound(replicas, **({} if self.pools is None else {"ResourcePoolManager": self.pools.replica_manager}))

    def replace(self, placed: PlacedReplica, started: RolloutReplica) -> None:
        """Puts the started server in the place of the lost one, also in the balancer."""
        lost, replica = placed.replica.server_address, placed.replica
        ray.get(self.global_load_balancer.remove_servers.remote([lost]))
        ray.get(self.global_load_balancer.add_servers.remote({started.server_address: started.server_handle}))
        # The workers first: the thread of a transfer ends the servers that it found beside dead workers.
        replica.workers, replica.resource_pool = started.workers, started.resource_pool
        if self.pools is not None:
            self.pools.without_devices.discard(replica.replica_rank)
        replica.servers, replica._server_handle = started.servers, started.server_handle
        replica._server_address = started.server_address

    def stop(self) -> None:
        """Ends every engine; one that does not end in time, for example after it was given up, ends with the job."""
        ending = {placed.replica.server_handle.end.remote(): placed.replica_id for placed in self.placed}
        ray.wait(list(ending), num_returns=len(ending), timeout=STOP_S)
        for ended, name in ending.items():
            try:
                ray.get(ended, timeout=0)
            except ray.exceptions.RayError as error:  # training is over and needs it no more
                logger.warning("%s did not end in order: %s: %s", name, type(error).__name__, error)

    def client(self) -> SeamlessClient:
        """The client by which agent loops generate."""
        return self.get_client(client_cls=SeamlessClient)


def release_devices(replica: RolloutReplica) -> None:
    """Ends the processes that hold the replica's devices, and frees these."""
    end_actors(replica.workers)
    for group in () if replica.resource_pool is None else replica.resource_pool.pgs or ():
        remove_placement_group(group)


def remove_groups_of(replica: RolloutReplica) -> None:
    """Removes what a pool of this replica has reserved, or waits for; verl's pool knows of it only once it is there.

    The names are those of verl's pools, and of ours for tags.
    """
    pool = f"rollout_pool_{replica.replica_rank}{replica.name_suffix}"
    for group in placement_group_table().values():
        if group["name"].startswith((f"{pool}verl_group", f"{pool}:")) and group["state"] != "REMOVED":
            with suppress(ValueError):  # the table has other jobs' groups too, which cannot be found by name
                remove_placement_group(get_placement_group(group["name"]))


def nodes_held_by(replica: RolloutReplica) -> set[str]:
    """The nodes on which its pool has reserved devices, and has not given them back."""
    tables = [placement_group_table(group) for group in replica.resource_pool.pgs or ()]
    held = [table for table in tables if table.get("state", "REMOVED") != "REMOVED"]  # Ray forgets old ones
    return {node for table in held for node in table["bundles_to_node_id"].values()}


async def do_nothing() -> None:
    """In the place of a launch that follows later."""


async def launch_within(replica: RolloutReplica, seconds: float) -> None:
    """Launches the replica's servers; raises TimeoutError if they do not serve within these seconds."""
    async with asyncio.timeout(seconds):
        await replica.launch_servers()


def end_actors(actors: Sequence[ray.actor.ActorHandle]) -> None:
    """Kills these actors; returns when Ray knows that they are dead. Raises TimeoutError if that takes too long."""
    for actor in actors:
        ray.kill(actor)
    deadline = time.monotonic() + GONE_S
    for actor in actors:
        while not is_dead(actor, deadline - time.monotonic()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{actor} still runs {GONE_S:g} s after it was killed")
            time.sleep(ASK_S)  # Ray notifies of no death


def is_dead(actor: ray.actor.ActorHandle, seconds: float) -> bool:
    """Whether Ray says within so many seconds that the actor is dead; one that was just killed may still reply."""
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=max(0.0, seconds))
    except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):  # its process may live
        return False
    except ACTOR_GONE:
        return True
    return False
