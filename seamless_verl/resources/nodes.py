"""Which nodes of a cluster a run cannot lose, where its task runner goes, and what is said of nodes. Imports no Ray.

A run survives the loss of a node that only generates, so nothing else is placed there. It needs the nodes of its other
machines, and that of its task runner and data plane.
"""

from __future__ import annotations

from collections.abc import Sequence

from seamless_verl.errors import ConfigError
from seamless_verl.resources.machines import (
    ClusterNode,
    Machine,
    assign,
    describe_shortage,
    machines_of,
    with_counts,
)
from seamless_verl.resources.plan import Plan

RUNNER_CPUS = 1  # Ray's default for an actor to be placed


def needed_nodes(plan: Plan | None, own: str, nodes: Sequence[ClusterNode]) -> list[str]:
    """The nodes whose loss ends the run: `own` first, then those of machines that do more than generate.

    Without a plan these are all nodes. A machine that has no node yet adds none.
    """
    if plan is None:
        return [own, *(node.node_id for node in nodes if node.node_id != own)]
    machines = machines_of(plan)
    assigned = assign(machines, nodes)
    found = [assigned[machine.number] for machine in machines if machine.number in assigned and machine.is_needed]
    return list(dict.fromkeys([own, *found]))


def only_generating(plan: Plan | None, nodes: Sequence[ClusterNode]) -> set[str]:
    """The nodes of machines that do nothing but generate; none without a plan."""
    if plan is None:
        return set()
    machines = machines_of(plan)
    assigned = assign(machines, nodes)
    needed = {assigned.get(machine.number) for machine in machines if machine.is_needed}
    return set(assigned.values()) - needed


def runner_node(plan: Plan, own: str, nodes: Sequence[ClusterNode], *, awaited: bool = False) -> ClusterNode | None:
    """The node for the task runner and the data plane: this one, or another one that the run needs anyway.

    `own` is this process's node. A node that only generates is none, since the run survives its loss.

    Raises:
        ConfigError: no such node has a CPU free; with `awaited`, where one may yet come, it is None then.
    """
    generating = only_generating(plan, nodes)
    own_first = sorted(nodes, key=lambda node: node.node_id != own)
    order = [node for node in own_first if node.node_id not in generating]
    found = next((node for node in order if node.free_cpus >= RUNNER_CPUS), None)
    if found is None and not awaited:
        have = "; ".join(f"{node.address}: {node.free_cpus:g} of {node.cpus:g} CPUs free" for node in order)
        reason = (
            "the task runner and the data plane need a node with a free CPU, which does not only generate "
            f"({have or 'every node is one of those that only generate'})"
        )
        raise ConfigError("ray start --num-cpus", None, reason, "Start the head, or a machine that trains, with more")
    return found


def describe_loss(node: ClusterNode, machines: Sequence[Machine]) -> str:
    """Names a node that is gone, by its address, its id, its labels and the machines that it was."""
    what = " and ".join(map(str, machines)) or "no machine of this run"
    return f"node {node.address} ({node.node_id[:8]}, {node}) is gone; it was {what}"


def describe_waiting(machines: Sequence[Machine], nodes: Sequence[ClusterNode], left_s: float) -> str:
    """What a run waits for: the machines, why the first has no node, and for how much longer."""
    missing = "; ".join(with_counts([str(machine) for machine in machines]))
    return f"waits for {missing}, {left_s:.0f} s more at most: {describe_shortage(machines[0], nodes)}"
