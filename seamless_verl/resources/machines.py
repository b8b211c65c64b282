"""Assigns the machines of a plan to the nodes of a cluster, and describes what is missing. Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

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

    The machine with the fewest nodes to choose from comes first, then the larger one. It takes the node with
    the fewest free devices, of those the one with the fewest further labels, then the first. Machines of one group
    are taken in their order, so that ranks follow the order of `nodes`.
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
