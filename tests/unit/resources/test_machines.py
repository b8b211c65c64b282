"""Machines of a plan find nodes: the hardest to place first, none twice, and what is missing is said."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.resources import group, plan

from seamless_verl.resources.machines import ClusterNode, Machine, assign, describe_shortage, machines_of

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
