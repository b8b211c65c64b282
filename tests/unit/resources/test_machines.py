"""Machines of a plan find nodes: the hardest to place first, none twice, and what is missing is said."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.resources import group, plan

from seamless_verl.errors import ConfigError
from seamless_verl.resources.machines import (
    CLOCK_S,
    ClusterNode,
    Machine,
    assign,
    describe_clock,
    describe_loss,
    describe_shortage,
    describe_waiting,
    machines_of,
    needed_nodes,
    only_generating,
    runner_node,
)

A, B = (("zone", "a"),), (("zone", "b"),)


def machine(number: int, devices: int, labels: tuple[tuple[str, str], ...] = ()) -> Machine:
    return Machine(number, f"g{number}", devices, ("train",), labels)


def node(name: str, devices: int, labels: tuple[tuple[str, str], ...] = (), free: int | None = None) -> ClusterNode:
    return ClusterNode(name, devices, devices if free is None else free, labels)


def test_a_small_machine_leaves_the_large_node_to_a_large_one() -> None:
    assert assign([machine(0, 2), machine(1, 4)], [node("x", 4), node("y", 2)]) == {0: "y", 1: "x"}


def test_a_machine_without_labels_leaves_the_labelled_node() -> None:
    nodes = [node("x", 2, A), node("y", 2)]
    assert assign([machine(0, 2), machine(1, 2, A)], nodes) == {0: "y", 1: "x"}
    assert assign([machine(0, 2)], nodes) == {0: "y"}
    wider = [node("x", 2, A), node("y", 4)]  # the tightest node would be the only one for the other
    assert assign([machine(0, 2), machine(1, 2, A)], wider) == {0: "y", 1: "x"}


def test_machines_alike_keep_the_order_of_the_nodes() -> None:
    assert assign([machine(0, 2), machine(1, 2)], [node("x", 2), node("y", 2)]) == {0: "x", 1: "y"}


def test_devices_that_others_use_are_not_taken() -> None:
    assert assign([machine(0, 2)], [node("x", 4, free=1), node("y", 4)]) == {0: "y"}


def test_a_node_that_leaves_is_not_taken() -> None:
    leaving = ClusterNode("x", 2, 2, leaving=True)
    assert assign([machine(0, 2)], [leaving, node("y", 4)]) == {0: "y"} and assign([machine(0, 2)], [leaving]) == {}
    assert "(the cluster has 2 devices (leaving))" in describe_shortage(machine(0, 2), [leaving])


def test_what_is_missing_is_said() -> None:
    nodes = [node("x", 2, A), node("y", 2, A), node("head", 0), node("z", 4, B, free=1)]
    summary = "(the cluster has 2 x 2 devices, zone=a; 4 devices (1 free), zone=b)"
    assert describe_shortage(machine(0, 2, (("zone", "c"),)), nodes) == f"no node has the label zone=c {summary}"
    assert describe_shortage(machine(0, 4, A), nodes) == f"no node with its labels has 4 devices {summary}"
    assert describe_shortage(machine(0, 4, B), nodes).startswith("other machines of the run, or other jobs")
    assert "(the cluster has no node with devices)" in describe_shortage(machine(0, 1), [])


def test_machines_have_the_plans_numbers() -> None:
    made = plan(group(2, 1, "train", "rollout", name="m", zone="a"), group(1, 3, "rollout"))
    machines = machines_of(made)
    assert [(m.number, m.group, m.devices) for m in machines] == [(0, "m", 1), (1, "m", 1), (2, "group1", 3)]
    assert machines[0].labels == A
    assert {device.node for device in made.devices} == {m.number for m in machines}


LABELS = st.sampled_from([(), A, B])


@settings(max_examples=100, deadline=None)
@given(
    machines=st.lists(st.tuples(st.integers(1, 4), LABELS), min_size=1, max_size=6),
    nodes=st.lists(st.tuples(st.integers(0, 4), LABELS), min_size=1, max_size=6),
)
def test_no_node_is_overfull_and_every_machine_is_where_it_asked(machines: list, nodes: list) -> None:  # type: ignore[type-arg]
    wanted = [machine(i, devices, labels) for i, (devices, labels) in enumerate(machines)]
    by_name = {f"n{i}": node(f"n{i}", devices, labels) for i, (devices, labels) in enumerate(nodes)}
    found = assign(wanted, list(by_name.values()))
    for name, each in by_name.items():
        assert sum(m.devices for m in wanted if found.get(m.number) == name) <= each.devices
    for m in wanted:
        if m.number in found:
            assert set(m.labels) <= set(by_name[found[m.number]].labels)
        else:
            assert describe_shortage(m, list(by_name.values()))


NOON = 12 * 3600.0


@pytest.mark.parametrize("clock", [NOON, NOON + 4, NOON + 10, NOON + 40, NOON - 30])
def test_a_late_reply_makes_no_clock_wrong(clock: float) -> None:
    assert describe_clock("replica-1", NOON, clock, NOON + 10) is None


def test_a_clock_that_is_off_is_described_with_both_times() -> None:
    ahead = describe_clock("replica-1", NOON, NOON + 181, NOON + 1)
    assert str(ahead).startswith("the clock of replica-1 is 180 s ahead: 12:03:01 UTC there, 12:00:01 UTC here. ")
    behind = describe_clock("actor worker 0", NOON, NOON - 60, NOON + 1)
    assert "is 60 s behind: 11:59:00 UTC there" in str(behind)
    assert describe_clock("replica-1", NOON, NOON + CLOCK_S, NOON) is None


TRAIN, ROLLOUT = (("does", "train"),), (("does", "rollout"),)
APART = plan(
    group(1, 2, "train", name="learners", does="train"), group(2, 2, "rollout", "own", name="engines", does="rollout")
)
COLOCATED = plan(group(2, 2, "train", "rollout", name="all"))


def host(name: str, labels: tuple[tuple[str, str], ...] = (), *, devices: int = 2, cpus: float = 8.0) -> ClusterNode:
    return ClusterNode(name, devices, devices, labels, f"10.0.0.{len(name)}", cpus, cpus)


def node_id_of(found: ClusterNode | None) -> str | None:
    return None if found is None else found.node_id


NODES = [
    host("one", ROLLOUT),
    host("three", ROLLOUT),
    host("trains", TRAIN),
    host("head", devices=0),
]


def test_the_nodes_that_only_generate_are_not_needed() -> None:
    assert needed_nodes(APART, "head", NODES) == ["head", "trains"]
    assert needed_nodes(APART, "trains", NODES) == ["trains"]
    assert only_generating(APART, NODES) == {"one", "three"}


def test_every_node_is_needed_where_all_train_or_nothing_is_known() -> None:
    nodes = [host("a"), host("b")]
    assert needed_nodes(COLOCATED, "a", nodes) == ["a", "b"] and only_generating(COLOCATED, nodes) == set()
    assert needed_nodes(None, "b", nodes) == ["b", "a"] and only_generating(None, nodes) == set()


def test_a_machine_without_a_node_yet_needs_none() -> None:
    assert needed_nodes(APART, "head", NODES[:2]) == ["head"]


@pytest.mark.parametrize(("own", "chosen"), [("head", "head"), ("trains", "trains"), ("one", "trains")])
def test_the_task_runner_is_here_unless_this_node_only_generates(own: str, chosen: str) -> None:
    assert node_id_of(runner_node(APART, own, NODES)) == chosen


def test_a_head_without_cpus_gives_the_task_runner_to_a_machine_that_trains() -> None:
    head = host("head", devices=0, cpus=0.0)
    assert node_id_of(runner_node(APART, "head", [head, *NODES[:3]])) == "trains"


def test_no_room_for_the_task_runner_is_refused_with_what_is_there() -> None:
    nodes = [*NODES[:2], host("trains", TRAIN, cpus=8.0), host("head", devices=0, cpus=0.5)]
    full = [ClusterNode(n.node_id, n.devices, n.free, n.labels, n.address, n.cpus, 0.25) for n in nodes]
    with pytest.raises(ConfigError, match=r"--num-cpus.*10\.0\.0\.4: 0\.25 of 0\.5 CPUs free; 10\.0\.0\.6: 0\.25 of 8"):
        runner_node(APART, "head", full)
    with pytest.raises(ConfigError, match="every node is one of those that only generate"):
        runner_node(APART, "one", full[:2])
    assert runner_node(APART, "head", full, awaited=True) is None, "one may yet come"


def test_devices_without_cpus_for_their_processes_are_no_machine() -> None:
    trains, generates, _ = machines_of(APART)
    assert (trains.cpus, generates.cpus) == (6, 4)
    poor = [host("a", TRAIN, cpus=5.0), host("b", ROLLOUT, cpus=4.0)]
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
