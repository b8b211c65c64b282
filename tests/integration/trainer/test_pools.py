"""Pools on a cluster of several nodes with labels: their placement, uneven machines, and refusals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import transfer_queue
from omegaconf import OmegaConf
from ray.cluster_utils import Cluster
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.utils import Role

from seamless_verl.errors import ConfigError
from seamless_verl.resources.machines import ClusterNode
from seamless_verl.resources.parallel import ParallelSizes, ReplicaSizes
from seamless_verl.resources.placement import Roles
from seamless_verl.resources.plan import Plan, make_plan
from seamless_verl.resources.tags import Resources
from seamless_verl.trainer.needed_nodes import SPREADING, STORAGE_RESOURCE, actors_on, places_storage
from seamless_verl.trainer.pools import TagPools, TagWorkers, roles_by_tags

TRANSFER_QUEUE = Path(transfer_queue.__file__).with_name("config.yaml")
pytestmark = [pytest.mark.integration, pytest.mark.long]
NODES = {"big": (2, {"zone": "a"}), "small": (1, {"zone": "a"}), "far": (2, {"zone": "b"})}
GROUPS = [
    {"name": "small", "count": 1, "devices": 1, "tags": ["train", "rollout"], "labels": {"zone": "a"}},
    {"name": "big", "count": 1, "devices": 2, "tags": ["train", "rollout"], "labels": {"zone": "a"}},
    {"name": "far", "count": 2, "devices": 1, "tags": ["rollout"], "labels": {"zone": "b"}},
]


class Group(TagWorkers, RayWorkerGroup):
    """A worker group like the trainer's."""


def workers_of(pool: RayResourcePool) -> RayWorkerGroup:
    """Workers that report their node; their class is sent by value, so that they import nothing of ours."""

    class Where:
        def place(self) -> dict[str, str]:
            names = ("RANK", "WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE")
            return {"node": ray.get_runtime_context().get_node_id(), **{name: os.environ[name] for name in names}}

    return Group(pool, RayClassWithInitArgs(ray.remote(Where)), device_name="cpu")


def places(group: RayWorkerGroup) -> list[dict[str, str]]:
    return ray.get([worker.place.remote() for worker in group.workers])  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Nodes:
    """A cluster whose nodes are all on this host and differ in their labels; `ids` by name."""

    cluster: Cluster
    ids: dict[str, str]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    cluster = Cluster()
    try:
        ids = {
            name: cluster.add_node(num_cpus=16, num_gpus=devices, labels=labels, include_dashboard=False).node_id
            for name, (devices, labels) in NODES.items()
        }
        ray.init(address=cluster.address, log_to_driver=False)
        yield Nodes(cluster, ids)
    finally:
        ray.shutdown()
        cluster.shutdown()


def planned(groups: list[dict[str, Any]]) -> Plan:
    resources = Resources.parse(groups)
    assert resources is not None
    return make_plan(resources, ParallelSizes(), ReplicaSizes(), Roles())


def test_a_label_that_no_node_has_is_refused_by_name(nodes: Nodes) -> None:
    with pytest.raises(ConfigError) as caught:
        TagPools(planned([*GROUPS, {**GROUPS[2], "name": "moon", "labels": {"zone": "moon"}}]))
    message = str(caught.value)
    assert "group moon" in message and "no node has the label zone=moon" in message and "tags rollout" in message
    for has in ("2 devices, zone=a", "1 devices, zone=a", "2 devices, zone=b"):
        assert has in message


def test_more_machines_than_the_cluster_has_are_refused(nodes: Nodes) -> None:
    with pytest.raises(ConfigError, match=r"a machine of far .*other machines of the run, or other jobs"):
        TagPools(planned([*GROUPS[:2], {**GROUPS[2], "count": 3}]))


def test_uneven_machines_and_replicas_land_on_their_nodes(nodes: Nodes) -> None:
    plan = planned(GROUPS)
    pools, kept = TagPools(plan), []
    manager = pools.trainer_manager(roles_by_tags(plan, {Role.ActorRollout: "global_pool"}))
    manager.create_resource_pool()
    assert manager.get_n_gpus() == 3
    group = workers_of(manager.get_resource_pool(Role.ActorRollout))
    found = places(group)
    assert [place["node"] for place in found] == [nodes.ids["small"], nodes.ids["big"], nodes.ids["big"]]
    assert [place["RANK"] for place in found] == ["0", "1", "2"] and group.world_size == 3
    assert [place["RAY_LOCAL_WORLD_SIZE"] for place in found] == ["1", "2", "2"]
    for rank in (3, 4):  # the standalone ones, each with a pool of its own, made as a replica makes it
        name = f"rollout_pool_{rank}"
        manager_of_one = pools.replica_manager({name: [1]}, mapping=None, max_colocate_count=2)
        manager_of_one.create_resource_pool()
        standalone = workers_of(manager_of_one.resource_pool_dict[name])
        assert [place["node"] for place in places(standalone)] == [nodes.ids["far"]]
        kept.append(standalone)  # verl's groups end with their last reference
    pool = manager.get_resource_pool(Role.ActorRollout)
    assert pool.get_placement_groups() == pool.get_placement_groups()


def test_a_machine_that_does_not_come_is_refused(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With waiting allowed the machine is requested by its labels; nothing stays reserved afterwards."""
    monkeypatch.setattr("seamless_verl.trainer.pools.READY_S", 1.0)
    monkeypatch.setattr("seamless_verl.trainer.pools.WAITING_S", 0.5)
    late = [{"name": "late", "count": 1, "devices": 1, "tags": ["train", "rollout"], "labels": {"zone": "moon"}}]
    pools = TagPools(planned(late), wait_s=0.5)
    manager = pools.trainer_manager({Role.ActorRollout: "global_pool"})
    manager.create_resource_pool()
    with pytest.raises(ConfigError, match=r"late.*did not come within 2 s; no node has the label zone=moon"):
        manager.get_resource_pool(Role.ActorRollout).get_placement_groups()
    states = {group["state"] for group in ray.util.placement_group_table().values() if "late" in group["name"]}
    assert states == {"REMOVED"}
    assert any(
        "waits for a machine of late" in text and "zone=moon (the cluster has" in text for text in caplog.messages
    )


def test_a_node_that_joins_is_used(nodes: Nodes) -> None:
    """As with an autoscaler: the pool is requested first, the node comes after."""
    late = [{"name": "new", "count": 1, "devices": 1, "tags": ["train", "rollout"], "labels": {"zone": "new"}}]
    pools = TagPools(planned(late), wait_s=20.0)
    manager = pools.trainer_manager({Role.ActorRollout: "global_pool"})
    manager.create_resource_pool()
    pool = manager.get_resource_pool(Role.ActorRollout)
    assert pools.nodes == {}
    with ThreadPoolExecutor() as threads:
        reserved = threads.submit(pool.get_placement_groups)
        node = nodes.cluster.add_node(num_cpus=16, num_gpus=1, labels={"zone": "new"})
        (group,) = reserved.result(timeout=60)
    placed = ray.util.placement_group_table(group)["bundles_to_node_id"]
    assert set(placed.values()) == {node.node_id} and pools.nodes == {0: node.node_id}


def test_actors_that_a_run_needs_stay_off_the_other_nodes(nodes: Nodes) -> None:
    """Those that verl spreads over all nodes, and those that it leaves to Ray; afterwards all is as before."""
    agent_loop, _, common, router = SPREADING

    class Where:
        def node(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    chosen = [nodes.ids["big"], nodes.ids["small"]]
    with actors_on(chosen):
        strategies = common.get_node_round_robin_scheduling_strategies(4)
        assert {strategy.node_id for strategy in strategies} == set(chosen)
        assert {node["NodeID"] for node in agent_loop.ray.nodes()} == set(chosen)
        assert len(agent_loop.ray.get([ray.put(1)])) == 1
        placed = [router.ray.remote(Where).remote() for _ in range(3)]  # with a CPU to be placed, as verl's have
        assert set(ray.get([actor.node.remote() for actor in placed])) == {chosen[0]}
    assert agent_loop.ray is router.ray is ray
    assert {node.node_id for node in common.get_node_round_robin_scheduling_strategies(9)} >= set(nodes.ids.values())


def test_transfer_queue_chooses_among_all_nodes_where_its_setting_names_their_resource(nodes: Nodes) -> None:
    agent_loop, _, common, _ = SPREADING
    config = OmegaConf.create({"transfer_queue": {"backend": {"SimpleStorage": {"required_node_resource": "storage"}}}})
    unset = OmegaConf.create({"transfer_queue": {"backend": {"SimpleStorage": {"required_node_resource": None}}}})
    assert places_storage(config) and not places_storage(unset) and not places_storage(OmegaConf.create({}))
    assert "required_node_resource" in OmegaConf.load(TRANSFER_QUEUE)[STORAGE_RESOURCE.split(".")[1]]["SimpleStorage"]
    node = nodes.cluster.add_node(num_cpus=1, resources={"storage": 1.0})
    with actors_on([nodes.ids["big"]], storage_elsewhere=places_storage(config)):
        strategies = common.get_node_round_robin_scheduling_strategies(2, required_node_resource="storage")
        assert {strategy.node_id for strategy in strategies} == {node.node_id}
        assert {one["NodeID"] for one in agent_loop.ray.nodes()} == {nodes.ids["big"]}


def test_a_replica_moves_to_a_node_that_its_machine_fits() -> None:
    def node(name: str, zone: str, free: int = 1) -> ClusterNode:
        return ClusterNode(name, max(free, 1), free, (("zone", zone),))

    cluster = [node("a", "a", 2), node("a-too", "a", 2), node("far", "b"), node("far-too", "b")]
    pools = TagPools(planned(GROUPS), nodes=lambda: cluster)
    assert {pools.nodes[2], pools.nodes[3]} == {"far", "far-too"}
    assert pools.move_replica(3, cluster) == [] and pools.nodes[2] == "far", "its node lives"
    left = [one for one in cluster if one.node_id != "far"]
    taken = [*left[:2], node("far-too", "b", free=0)]
    assert [machine.number for machine in pools.move_replica(3, taken)] == [2] and pools.nodes[2] == "far"
    assert pools.move_replica(3, [*taken, node("late", "b")]) == [] and pools.nodes[2] == "late"
    both = [*left[:2], node("new", "b")]
    assert pools.move_replica(3, both) == [] and pools.nodes[2] == "new"
    assert pools.move_replica(4, both) != [], "what another machine is about to reserve is not free"
    assert pools.move_replica(4, [*both, node("newer", "b")]) == [] and pools.nodes[3] == "newer"
    assert {node: [m.number for m in machines] for node, machines in pools.machines_by_node().items()}["new"] == [2]
