"""What a run cannot lose stays off the nodes that only generate; what is missing or gone is named."""

from __future__ import annotations

import pytest
from support.resources import group, plan

from seamless_verl.errors import ConfigError
from seamless_verl.resources.machines import ClusterNode, assign, describe_shortage, machines_of
from seamless_verl.resources.nodes import (
    describe_loss,
    describe_waiting,
    needed_nodes,
    only_generating,
    runner_node,
)

TRAIN, ROLLOUT = (("does", "train"),), (("does", "rollout"),)
APART = plan(
    group(1, 2, "train", name="learners", does="train"), group(2, 2, "rollout", "own", name="engines", does="rollout")
)
COLOCATED = plan(group(2, 2, "train", "rollout", name="all"))


def node(name: str, labels: tuple[tuple[str, str], ...] = (), *, devices: int = 2, cpus: float = 8.0) -> ClusterNode:
    return ClusterNode(name, devices, devices, labels, f"10.0.0.{len(name)}", cpus, cpus)


def node_id_of(found: ClusterNode | None) -> str | None:
    return None if found is None else found.node_id


NODES = [node("one", ROLLOUT), node("three", ROLLOUT), node("trains", TRAIN), node("head", devices=0)]


def test_the_nodes_that_only_generate_are_not_needed() -> None:
    assert needed_nodes(APART, "head", NODES) == ["head", "trains"]
    assert needed_nodes(APART, "trains", NODES) == ["trains"]
    assert only_generating(APART, NODES) == {"one", "three"}


def test_every_node_is_needed_where_all_train_or_nothing_is_known() -> None:
    nodes = [node("a"), node("b")]
    assert needed_nodes(COLOCATED, "a", nodes) == ["a", "b"] and only_generating(COLOCATED, nodes) == set()
    assert needed_nodes(None, "b", nodes) == ["b", "a"] and only_generating(None, nodes) == set()


def test_a_machine_without_a_node_yet_needs_none() -> None:
    assert needed_nodes(APART, "head", NODES[:2]) == ["head"]


@pytest.mark.parametrize(("own", "chosen"), [("head", "head"), ("trains", "trains"), ("one", "trains")])
def test_the_task_runner_is_here_unless_this_node_only_generates(own: str, chosen: str) -> None:
    assert node_id_of(runner_node(APART, own, NODES)) == chosen


def test_a_head_without_cpus_gives_the_task_runner_to_a_machine_that_trains() -> None:
    head = node("head", devices=0, cpus=0.0)
    assert node_id_of(runner_node(APART, "head", [head, *NODES[:3]])) == "trains"


def test_no_room_for_the_task_runner_is_refused_with_what_is_there() -> None:
    nodes = [*NODES[:2], node("trains", TRAIN, cpus=8.0), node("head", devices=0, cpus=0.5)]
    full = [ClusterNode(n.node_id, n.devices, n.free, n.labels, n.address, n.cpus, 0.25) for n in nodes]
    with pytest.raises(ConfigError, match=r"--num-cpus.*10\.0\.0\.4: 0\.25 of 0\.5 CPUs free; 10\.0\.0\.6: 0\.25 of 8"):
        runner_node(APART, "head", full)
    with pytest.raises(ConfigError, match="every node is one of those that only generate"):
        runner_node(APART, "one", full[:2])
    assert runner_node(APART, "head", full, awaited=True) is None, "one may yet come"


def test_devices_without_cpus_for_their_processes_are_no_machine() -> None:
    trains, generates, _ = machines_of(APART)
    assert (trains.cpus, generates.cpus) == (6, 4)
    poor = [node("a", TRAIN, cpus=5.0), node("b", ROLLOUT, cpus=4.0)]
    assert assign([trains, generates], poor) == {generates.number: "b"}
    assert describe_shortage(trains, poor).startswith(
        "verl reserves 6 CPUs with these devices, and no node with them has more than 5 (ray start --num-cpus"
    )


def test_a_node_that_is_gone_is_named_with_its_group_and_labels() -> None:
    _, engines, _ = machines_of(APART)
    assert describe_loss(NODES[0], [engines]) == (
        "node 10.0.0.3 (one, 2 devices, does=rollout) is gone; "
        "it was a machine of engines (2 devices, tags rollout+own, label does=rollout)"
    )
    assert describe_loss(NODES[3], []).endswith("it was no machine of this run")


def test_what_is_waited_for_is_said() -> None:
    machines = machines_of(APART)
    text = describe_waiting(machines[1:], [NODES[2]], 12.4)
    assert text == (
        "waits for 2 x a machine of engines (2 devices, tags rollout+own, label does=rollout), 12 s more at most: "
        "no node has the label does=rollout (the cluster has 2 devices, does=train)"
    )
