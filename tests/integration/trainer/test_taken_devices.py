"""A lost replica takes devices on another node, which may go away at that moment."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from seamless_verl.data_plane.client import PlacedReplica
from seamless_verl.resources.machines import ClusterNode
from seamless_verl.resources.parallel import ParallelSizes, ReplicaSizes
from seamless_verl.resources.placement import Roles
from seamless_verl.resources.plan import make_plan
from seamless_verl.resources.tags import Resources
from seamless_verl.trainer import servers
from seamless_verl.trainer.pools import TagPools

pytestmark = pytest.mark.integration


class Replica(SimpleNamespace):
    """One that verl would give devices; `ready` is when it has them."""

    def __init__(self, ready: threading.Event) -> None:
        super().__init__(workers=["old"], resource_pool=None, ready=ready, launched=0, replica_rank=0)

    async def init_standalone(self) -> None:
        self.ready.wait()
        self.workers = ["new"]
        await self.launch_servers()

    async def launch_servers(self) -> None:
        self.launched += 1


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(servers, "release_devices", lambda replica: None)
    made = object.__new__(servers.SeamlessServers)
    made.pools, made.taking = None, threading.Lock()
    return made


def test_devices_are_taken_without_a_launch(manager: Any) -> None:
    replica = Replica(threading.Event())
    replica.ready.set()
    manager._take_devices(replica)
    assert replica.workers == ["new"] and replica.launched == 0
    assert replica.launch_servers.__func__ is Replica.launch_servers, "the launch follows"


def test_devices_that_never_come_hold_up_no_other_replica(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[object] = []
    monkeypatch.setattr(servers, "remove_groups_of", removed.append)
    stuck, other = Replica(threading.Event()), Replica(threading.Event())
    other.ready.set()
    with monkeypatch.context() as soon:
        soon.setattr(servers, "TAKE_S", 0.2)
        with pytest.raises(TimeoutError):
            manager._take_devices(stuck)
    assert removed == [stuck]
    manager._take_devices(other)
    assert other.workers == ["new"]
    stuck.ready.set()
    for thread in threading.enumerate():
        if thread.name == "taking devices":
            thread.join(10)
    assert stuck.launched == 0, "what comes too late launches nothing"


def test_what_a_replica_reserved_is_removed_under_the_names_of_both_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has the groups of all jobs; those of others cannot be found by name."""
    own = {"rollout_pool_3:group 0:0": "PENDING", "rollout_pool_3verl_group_1:0": "CREATED"}
    others = ["rollout_pool_30:group 0:0", "rollout_pool_30verl_group_1:0", "rollout_pool_reward_3verl_group_1:0"]
    table = [("rollout_pool_3:group 9:0", "PENDING"), ("rollout_pool_3:group 0:1", "REMOVED"), *own.items()]
    table += [(name, "PENDING") for name in others]

    def by_name(name: str) -> str:
        if name == "rollout_pool_3:group 9:0":
            raise ValueError("Failed to look up placement group")
        return name

    removed: list[str] = []
    rows = {str(i): {"name": name, "state": state} for i, (name, state) in enumerate(table)}
    monkeypatch.setattr(servers, "placement_group_table", lambda: rows)
    monkeypatch.setattr(servers, "get_placement_group", by_name)
    monkeypatch.setattr(servers, "remove_placement_group", removed.append)
    servers.remove_groups_of(SimpleNamespace(replica_rank=3, name_suffix=""))
    assert removed == list(own)


def pools_of(engines: int, devices: int) -> TagPools:
    """One machine trains, on `a`; so many generate, with so many devices each, on `b0`, `b1` and so on.

    Rank 0 shares the device that trains.
    """
    resources = Resources.parse(
        [
            {"name": "head", "count": 1, "devices": 1, "tags": ["train", "rollout"], "labels": {"zone": "a"}},
            {"name": "far", "count": engines, "devices": devices, "tags": ["rollout"], "labels": {"zone": "b"}},
        ]
    )
    assert resources is not None
    plan = make_plan(resources, ParallelSizes(), ReplicaSizes(), Roles())
    found = [ClusterNode("a", 1, 1, (("zone", "a"),)), *(node(f"b{i}", devices, devices) for i in range(engines))]
    return TagPools(plan, nodes=lambda: found)


def node(name: str, free: int, devices: int = 1) -> ClusterNode:
    return ClusterNode(name, devices, free, (("zone", "b"),))


def test_a_replica_whose_devices_somebody_took_gets_those_of_another_node(manager: Any) -> None:
    manager.pools = pools = pools_of(engines=1, devices=1)
    taken, other = node("b0", free=0), node("b1", free=1)
    assert pools.move_replica(1, [taken, other]) == [] and pools.nodes[1] == "b0", "it holds these devices itself"

    class Refused(Replica):
        async def init_standalone(self) -> None:
            raise RuntimeError("its devices did not come")

    replica = Refused(threading.Event())
    replica.replica_rank = 1
    with pytest.raises(RuntimeError, match="did not come"):
        manager._take_devices(replica)
    assert [machine.number for machine in pools.move_replica(1, [taken])] == [1] and pools.nodes[1] == "b0", "it waits"
    assert pools.move_replica(1, [node("b0", free=1), other]) == [] and pools.nodes[1] == "b0", "they are free again"
    assert pools.move_replica(1, [taken, other]) == [] and pools.nodes[1] == "b1"


def test_devices_are_its_own_once_a_replica_has_started(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager.pools, manager.global_load_balancer = pools_of(engines=1, devices=1), SimpleNamespace()
    for change in ("remove_servers", "add_servers"):
        setattr(manager.global_load_balancer, change, SimpleNamespace(remote=lambda _: None))
    monkeypatch.setattr(servers.ray, "get", lambda reply: reply)
    server = {"servers": [], "server_handle": None, "server_address": "here:1"}
    replica = SimpleNamespace(replica_rank=1, workers=[], resource_pool=None, **server)
    placed: Any = PlacedReplica(replica, shares_device=False, devices=("rollout-0",))
    manager.leave(placed)
    assert manager.pools.move_replica(1, [node("b0", free=0)]) != []
    manager.replace(placed, replica)
    assert manager.pools.move_replica(1, [node("b0", free=0)]) == []


def test_a_machine_that_has_other_replicas_does_not_move_for_one_of_them() -> None:
    pools = pools_of(engines=1, devices=2)
    assert pools.nodes_of(1) == pools.nodes_of(2) == {pools.nodes[1]}
    pools.without_devices.add(1)
    full, other = node("b0", free=0, devices=2), node("b1", free=2, devices=2)
    assert [machine.number for machine in pools.move_replica(1, [full, other])] == [1]
    assert pools.nodes[1] == "b0" and pools.move_replica(1, [node("b0", free=1, devices=2), other]) == []
    assert pools.move_replica(1, [other]) == [] and pools.nodes[1] == "b1", "a node that is gone has none of them"


@pytest.mark.parametrize("state", ["CREATED", "REMOVED", None])
def test_without_tags_a_replica_that_gave_its_devices_back_waits_for_free_ones(
    manager: Any, monkeypatch: pytest.MonkeyPatch, state: str | None
) -> None:
    """None: Ray has forgotten the group that was removed."""
    row = {} if state is None else {"state": state, "bundles_to_node_id": {0: "b0"}}
    replica = SimpleNamespace(
        replica_rank=0, nnodes=1, gpus_per_replica_node=1, workers=[], resource_pool=SimpleNamespace(pgs=["own"])
    )
    monkeypatch.setattr(servers, "placement_group_table", lambda group: row)
    monkeypatch.setattr(manager, "keeps_devices", lambda placed: False)
    placed: Any = PlacedReplica(replica, shares_device=False, devices=("rollout-0",))
    for free, waits in ((0, state != "CREATED"), (1, False)):
        monkeypatch.setattr(servers, "cluster_nodes", lambda free=free: [node("b0", free)])
        assert (manager.missing_for(placed) is not None) is waits
