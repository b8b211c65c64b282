"""Places verl's resource pools and worker groups on the machines of the plan, which may differ from each other.

Each machine of the plan is assigned to a node of the cluster, where Ray's label selector keeps it. One for which no
node has room yet is requested by its labels alone: an autoscaling cluster then starts a node, which is awaited for at
most `wait_s` seconds. Worker groups follow their machines; verl's own treat a pool as copies of its first one.

Invariant: one node for each machine, and on no node more devices than it has.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from verl.plugin.platform import get_platform
from verl.single_controller.ray.base import RayResourcePool, ResourcePoolManager
from verl.trainer.ppo.utils import Role

from seamless_verl.errors import ConfigError
from seamless_verl.resources.machines import (
    ClusterNode,
    Machine,
    assign,
    describe_shortage,
    describe_waiting,
    machines_of,
)
from seamless_verl.resources.plan import Plan
from seamless_verl.resources.tags import KEY

logger = logging.getLogger(__name__)
NODE_ID = "ray.io/node-id"
WAITING_S = 5.0  # between two lines on what is waited for
REPLICA_POOL = re.compile(r"rollout_pool_(\d+)")  # as verl names the pool of a standalone replica
READY_S = 60.0  # for Ray to reserve bundles on nodes that exist


def cluster_nodes() -> list[ClusterNode]:
    """The nodes that are alive, ordered by address, as verl orders ranks."""
    resource, found = device_resource(), list[ClusterNode]()
    available = ray._private.state.available_resources_per_node()  # as in verl's own check
    draining = ray._private.state.state.get_draining_nodes()  # Ray 2.60 says it nowhere else
    for node in sorted(ray.nodes(), key=lambda node: (node["NodeManagerAddress"], node["NodeID"])):
        if node["Alive"]:
            free = available.get(node["NodeID"], node["Resources"])  # a new node is not listed yet
            known = ClusterNode(
                node["NodeID"],
                devices=int(node["Resources"].get(resource, 0)),
                free=int(free.get(resource, 0)),
                labels=tuple(sorted(node["Labels"].items())),
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                free_cpus=free.get("CPU", 0.0),
                leaving=node["NodeID"] in draining,
            )
            found.append(known)
    return found


def device_resource() -> str:
    return str(get_platform().ray_resource_name())


def shortage_error(machines: Sequence[Machine], nodes: Sequence[ClusterNode], problem: str) -> ConfigError:
    """The error for machines without a node: names the first one's tags or labels, and what the cluster has."""
    first = machines[0]
    key = f"{KEY}: group {first.group}"
    more = f" and {len(machines) - 1} more" if len(machines) > 1 else ""
    reason = f"{first}{more} {problem}; {describe_shortage(first, nodes)}"
    way_out = "Lower its count or devices, start such a node (ray start --labels), or set seamless.wait_for_machines_s"
    return ConfigError(key, dict(first.labels) or list(first.tags), reason, way_out)


class TagResourcePool(RayResourcePool):  # type: ignore[misc]
    """A pool with one placement group for each machine, on the machine's node; ranks follow the plan's order.

    A machine that had no node yet is put into `nodes` with the one that it gets, by its number.
    """

    def __init__(
        self, machines: Sequence[PlacedMachine], *, wait_s: float, nodes: dict[int, str], **kwargs: Any
    ) -> None:
        super().__init__(process_on_nodes=[placed.devices for placed in machines], **kwargs)
        self.machines, self.wait_s, self.nodes = tuple(machines), wait_s, nodes

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """One group for each machine, packed on one node. The first call reserves them, later ones return the same.

        Raises:
            ConfigError: no node came in time for a machine.
        """
        if self.pgs is None:
            self.pgs = self._reserve(name or self.name_prefix)
        return list(self.pgs)

    def _reserve(self, name: str) -> list[PlacementGroup]:
        bundle = {"CPU": self.max_colocate_count, **({device_resource(): 1} if self.use_gpu else {})}
        lifetime = "detached" if self.detached else None
        groups = [
            placement_group(
                bundles=[dict(bundle) for _ in range(placed.devices)],
                strategy="STRICT_PACK",
                name=f"{name}:{placed.machine.group}:{i}",
                lifetime=lifetime,
                bundle_label_selector=[dict(placed.selector)] * placed.devices,
            )
            for i, placed in enumerate(self.machines)
        ]
        if waiting := self._await(groups):
            for group in groups:
                remove_placement_group(group)
            raise shortage_error(waiting, cluster_nodes(), f"did not come within {self.wait_s + READY_S:.0f} s")
        for placed, group in zip(self.machines, groups, strict=True):
            (node,) = set(placement_group_table(group)["bundles_to_node_id"].values())
            self.nodes.setdefault(placed.machine.number, node)
        return groups

    def _await(self, groups: Sequence[PlacementGroup]) -> list[Machine]:
        """Returns when all groups are reserved, or it has taken too long: the machines that have no node then."""
        refs = [group.ready() for group in groups]
        deadline = time.monotonic() + self.wait_s + READY_S
        while True:
            left_s = deadline - time.monotonic()
            _, late = ray.wait(refs, num_returns=len(refs), timeout=max(0.0, min(WAITING_S, left_s)))
            waiting = [placed.machine for placed, ref in zip(self.machines, refs, strict=True) if ref in late]
            if not waiting or left_s <= WAITING_S:
                return waiting
            logger.warning("%s", describe_waiting(waiting, cluster_nodes(), left_s))


@dataclass(frozen=True)
class PlacedMachine:
    """So many `devices` of a machine, and the labels of the node that holds them."""

    machine: Machine
    devices: int
    selector: tuple[tuple[str, str], ...]


@dataclass
class TagPoolManager(ResourcePoolManager):  # type: ignore[misc]
    """verl's manager with pools of placed machines; `resource_pool_spec` has the devices of each machine."""

    machines: Mapping[str, Sequence[PlacedMachine]] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    wait_s: float = 0.0

    def create_resource_pool(self) -> None:
        """Makes the pools. Their placement groups are made together with the workers, as verl does it."""
        for name, machines in self.machines.items():
            self.resource_pool_dict[name] = TagResourcePool(
                machines,
                wait_s=self.wait_s,
                nodes=self.nodes,
                max_colocate_count=self.max_colocate_count,
                name_prefix=name,
            )

    def _check_resource_available(self) -> None:
        """Checks nothing: each machine was assigned to a node before this manager was made."""


class TagPools:
    """Assigns the machines of a plan to nodes, and makes the pool managers of the trainer and of replicas."""

    def __init__(
        self, plan: Plan, *, wait_s: float = 0.0, nodes: Callable[[], list[ClusterNode]] | None = None
    ) -> None:
        """Assigns machines to nodes.

        Raises:
            ConfigError: the cluster has no node for a machine and `wait_s` is 0.
        """
        self.plan, self.wait_s = plan, wait_s
        found = (nodes or cluster_nodes)()
        self.machines = machines_of(plan)
        self.nodes = assign(self.machines, found)
        self.without_devices = set[int]()  # ranks of lost replicas that hold none, which others may take meanwhile
        absent = [machine for machine in self.machines if machine.number not in self.nodes]
        if absent and not wait_s:
            raise shortage_error(absent, found, "has no node")
        self.check_integrity(found)

    def trainer_manager(self, mapping: dict[Any, str]) -> TagPoolManager:
        """For `PPOTrainer.resource_pool_manager`: the trainer's pool, and those of roles with their own machines."""
        pools = {"global_pool": self._placed(self.plan.trainer.devices)}
        for place in self.plan.places:
            if place.pool in mapping.values() and place.pool not in pools:
                pools[place.pool] = self._placed(place.devices)
        return self._manager(pools, mapping)

    def replica_manager(
        self, resource_pool_spec: dict[str, list[int]], mapping: Any = None, max_colocate_count: int = 3
    ) -> ResourcePoolManager:
        """Replaces verl's class where a replica makes its own pool (replica.py `init_standalone`)."""
        (name,) = resource_pool_spec
        rank = REPLICA_POOL.fullmatch(name)
        if rank is None:  # of a reward model or a teacher
            return ResourcePoolManager(resource_pool_spec, mapping, max_colocate_count)
        replica = self.plan.replicas[int(rank.group(1))]
        return self._manager({name: self._placed(replica.devices)}, mapping, max_colocate_count)

    def machines_by_node(self) -> dict[str, list[Machine]]:
        """The machines that are on each node, by its id."""
        found: dict[str, list[Machine]] = {}
        for number, node in self.nodes.items():
            found.setdefault(node, []).append(self.machines[number])
        return found

    def move_replica(self, rank: int, nodes: Sequence[ClusterNode]) -> list[Machine]:
        """Gives the machines of this replica whose nodes are gone, or are leaving, other nodes among `nodes`.

        So it does where the replica holds no devices, and its node has no room for them any more. A machine that has
        other replicas, too, stays there. Returns the machines for which there is none yet; then nothing has changed.
        """
        staying = {node.node_id: node for node in nodes if not node.leaving}
        lost, full = list[Machine](), list[Machine]()
        for machine, devices in self._machines_of(self.plan.replicas[rank].devices).items():
            node = staying.get(self.nodes.get(machine.number, ""))
            if node is None:
                lost.append(machine)
            elif rank in self.without_devices and node.free < devices:
                (lost if devices == machine.devices else full).append(machine)
        moved = assign(lost, [self._without_promised(node) for node in nodes])
        missing = full + [machine for machine in lost if machine.number not in moved]
        self.nodes |= {} if missing else moved
        return missing

    def nodes_of(self, rank: int) -> set[str]:
        """The nodes of this replica's machines, as far as they have any."""
        machines = self._machines_of(self.plan.replicas[rank].devices)
        return {self.nodes[machine.number] for machine in machines if machine.number in self.nodes}

    def _without_promised(self, node: ClusterNode) -> ClusterNode:
        """The node less the devices that its machines of this run have or are about to reserve."""
        promised = sum(self.machines[number].devices for number, name in self.nodes.items() if name == node.node_id)
        return replace(node, free=min(node.free, node.devices - promised))

    def check_integrity(self, nodes: Sequence[ClusterNode]) -> None:
        """Every node has at least the devices that were assigned to it."""
        for node in nodes:
            assigned = sum(m.devices for m in self.machines if self.nodes.get(m.number) == node.node_id)
            assert assigned <= node.free, f"{assigned} devices on {node.node_id}, which has {node.free}"

    def _manager(
        self, pools: dict[str, list[PlacedMachine]], mapping: Any, max_colocate_count: int = 3
    ) -> TagPoolManager:
        spec = {name: [placed.devices for placed in machines] for name, machines in pools.items()}
        return TagPoolManager(spec, mapping, max_colocate_count, machines=pools, nodes=self.nodes, wait_s=self.wait_s)

    def _placed(self, numbers: Sequence[int]) -> list[PlacedMachine]:
        """The machines of these devices, in the order of their first device."""
        found = list[PlacedMachine]()
        for machine, devices in self._machines_of(numbers).items():
            node = self.nodes.get(machine.number)
            found.append(PlacedMachine(machine, devices, machine.labels if node is None else ((NODE_ID, node),)))
        return found

    def _machines_of(self, devices: Sequence[int]) -> dict[Machine, int]:
        """How many of these devices are on each machine."""
        of_device = {device.number: device.node for device in self.plan.devices}
        counts = Counter(of_device[device] for device in devices)
        return {self.machines[number]: count for number, count in counts.items()}


def roles_by_tags(plan: Plan, mapping: Mapping[Role, str]) -> dict[Role, str]:
    """The pool of each role: those with machines of their own move there, others stay where `mapping` has them."""
    roles = {"critic": Role.Critic, "ref": Role.RefPolicy, "reward": Role.RewardModel, "teacher": Role.TeacherModel}
    own = {roles[place.tag]: place.pool for place in plan.places if place.tag in roles}
    return {role: own.get(role, pool) for role, pool in mapping.items()}


class TagWorkers:
    """Mixed into a RayWorkerGroup: each machine of the pool gets as many ranks as it has devices."""

    def _init_with_resource_pool(
        self: Any,
        resource_pool: RayResourcePool,
        ray_cls_with_init: Any,
        bin_pack: bool,
        detached: bool,
        worker_env: dict[str, str] | None = None,
    ) -> None:
        if not isinstance(resource_pool, TagResourcePool):
            super()._init_with_resource_pool(  # type: ignore[misc]
                resource_pool, ray_cls_with_init, bin_pack, detached, worker_env
            )
            return
        self.resource_pool = resource_pool
        groups = resource_pool.get_placement_groups(device_name=self.device_name)
        self._world_size = resource_pool.world_size
        self._get_master_addr_port(groups[0], bundle_index=0, master_port_range=self._ray_master_port_range)
        rank = 0
        for index, (group, count) in enumerate(zip(groups, resource_pool.store, strict=True)):
            for local_rank in range(count):
                self._create_worker(
                    rank=rank,
                    pg_idx=index,
                    pg=group,
                    local_rank=local_rank,
                    resource_pool=_OneMachine(resource_pool, count),
                    ray_cls_with_init=ray_cls_with_init,
                    worker_env=worker_env,
                    detached=detached,
                )
                rank += 1


class _OneMachine:
    """What `_create_worker` reads of a pool, for one machine: verl takes `store[0]` for every machine."""

    def __init__(self, pool: RayResourcePool, count: int) -> None:
        self.world_size, self.use_gpu, self.store = pool.world_size, pool.use_gpu, [count]
        self.max_colocate_count = pool.max_colocate_count
