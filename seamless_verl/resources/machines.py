"""Machines of a plan and nodes of a cluster: which is which, what is missing, what a run cannot lose. Imports no Ray.

A run survives the loss of a node that only generates, so nothing else is placed there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from seamless_verl.errors import ConfigError
from seamless_verl.resources.plan import Plan
from seamless_verl.resources.tags import ROLE_TAGS, ROLLOUT

# verl 0.9.1, `max_colocate_count`: CPUs in a bundle with each device, in trainer_base.py and in replica.py.
CPUS_A_DEVICE, CPUS_OF_REPLICA = 3, 2


@dataclass(frozen=True)
class Machine:
    """One machine of the plan, by its number there."""

    number: int
    group: str
    devices: int
    tags: tuple[str, ...]
    labels: tuple[tuple[str, str], ...]

    @property
    def cpus(self) -> int:
        """CPUs that verl reserves for its devices, for the processes that share them."""
        return self.devices * (CPUS_A_DEVICE if self.is_needed else CPUS_OF_REPLICA)

    @property
    def is_needed(self) -> bool:
        """Whether its loss ends the run: it does more than generate."""
        return any(tag in ROLE_TAGS and tag != ROLLOUT for tag in self.tags)

    def __str__(self) -> str:
        labels = "".join(f", label {key}={value}" for key, value in self.labels)
        return f"a machine of {self.group} ({self.devices} devices, tags {'+'.join(self.tags)}{labels})"


@dataclass(frozen=True)
class ClusterNode:
    """One node of the cluster: its devices and CPUs, how many of them are free, its labels and its address.

    One that is `leaving` is announced to be removed: nothing more is placed there.
    """

    node_id: str
    devices: int
    free: int
    labels: tuple[tuple[str, str], ...] = ()
    address: str = ""
    cpus: float = inf
    free_cpus: float = inf
    leaving: bool = False

    def can_hold(self, machine: Machine) -> bool:
        """Whether it has the devices, their CPUs and the labels, free or not."""
        has_room = machine.devices <= self.devices and machine.cpus <= self.cpus
        return has_room and set(machine.labels) <= set(self.labels)

    def __str__(self) -> str:
        own = [f"{key}={value}" for key, value in self.labels if not key.startswith("ray.io/")]
        used = f" ({self.free} free)" if self.free < self.devices else ""
        used += " (leaving)" if self.leaving else ""
        return f"{self.devices} devices{used}{''.join(f', {label}' for label in own)}"


def machines_of(plan: Plan) -> tuple[Machine, ...]:
    """All machines of the plan, in the order of their numbers."""
    found = [(group, number) for group in plan.groups for number in range(group.count)]
    return tuple(
        Machine(number, group.name, group.devices, group.tags, group.labels) for number, (group, _) in enumerate(found)
    )


def assign(machines: Sequence[Machine], nodes: Sequence[ClusterNode]) -> dict[int, str]:
    """Node ids by machine number; a machine for which no node has enough free devices is left out.

    The machine with the fewest nodes to choose from comes first, then the larger one. It takes the node with the fewest
    free devices, then with the fewest further labels. Ranks of a group follow the order of `nodes`.
    """
    free = {node.node_id: node.free for node in nodes}
    choices = {m.number: sum(node.can_hold(m) for node in nodes) for m in machines}
    assigned: dict[int, str] = {}
    for machine in sorted(machines, key=lambda m: (choices[m.number], -m.devices, m.number)):
        fits = [n for n in nodes if not n.leaving and n.can_hold(machine) and free[n.node_id] >= machine.devices]
        if fits:
            best = min(fits, key=lambda n: (free[n.node_id], len(n.labels)))
            free[best.node_id] -= machine.devices
            assigned[machine.number] = best.node_id
    return assigned


def describe_shortage(machine: Machine, nodes: Sequence[ClusterNode]) -> str:
    """Why a machine found no node: the first label that no node has, or the devices."""
    with_devices = [node for node in nodes if node.devices]
    summary = "; ".join(with_counts([str(node) for node in with_devices])) or "no node with devices"
    for label in machine.labels:
        if not any(label in node.labels for node in nodes):
            return f"no node has the label {label[0]}={label[1]} (the cluster has {summary})"
    labelled = [node for node in nodes if set(machine.labels) <= set(node.labels) and node.devices >= machine.devices]
    if labelled and all(node.cpus < machine.cpus for node in labelled):
        most = max(node.cpus for node in labelled)
        return (
            f"verl reserves {machine.cpus} CPUs with these devices, and no node with them has more than {most:g} "
            f"(ray start --num-cpus; the cluster has {summary})"
        )
    if not any(node.can_hold(machine) for node in nodes):
        return f"no node with its labels has {machine.devices} devices (the cluster has {summary})"
    return f"other machines of the run, or other jobs, have the nodes that would do (the cluster has {summary})"


def with_counts(texts: Sequence[str]) -> list[str]:
    """Each text once, with how often it is there where it is more than once."""
    counts: Mapping[str, int] = {text: texts.count(text) for text in dict.fromkeys(texts)}
    return [text if count == 1 else f"{count} x {text}" for text, count in counts.items()]


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


CLOCK_S = 30.0  # what a clock may be off: hosts that are synchronized agree to less than a second


def describe_clock(name: str, asked: float, clock: float, replied: float) -> str | None:
    """The warning for a process whose clock said `clock` between two times of this one, in seconds since 1970.

    None for a clock that may be right.
    """
    off_s = max(0.0, clock - replied) + min(0.0, clock - asked)  # by how much it is ahead at least; behind if negative
    if abs(off_s) <= CLOCK_S:
        return None
    there, here = (time.strftime("%H:%M:%S", time.gmtime(at)) for at in (clock, replied))
    more = "ahead" if off_s > 0 else "behind"
    return (
        f"the clock of {name} is {abs(off_s):.0f} s {more}: {there} UTC there, {here} UTC here. Times in logs, "
        "in the journal and of devices do not agree; synchronize the clocks of the nodes (chrony, ntpd)"
    )
