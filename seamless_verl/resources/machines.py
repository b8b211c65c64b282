"""Machines of a plan against nodes of a cluster: which goes where, and what is missing. Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from seamless_verl.resources.plan import Plan


@dataclass(frozen=True)
class Machine:
    """One machine of the plan, by its number there."""

    number: int
    group: str
    devices: int
    tags: tuple[str, ...]
    labels: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        labels = "".join(f", label {key}={value}" for key, value in self.labels)
        return f"a machine of {self.group} ({self.devices} devices, tags {'+'.join(self.tags)}{labels})"


@dataclass(frozen=True)
class ClusterNode:
    """One node of the cluster: its devices, those that nobody uses, and its labels."""

    node_id: str
    devices: int
    free: int
    labels: tuple[tuple[str, str], ...] = ()

    def carries(self, machine: Machine) -> bool:
        return machine.devices <= self.devices and set(machine.labels) <= set(self.labels)

    def __str__(self) -> str:
        own = [f"{key}={value}" for key, value in self.labels if not key.startswith("ray.io/")]
        used = f" ({self.free} free)" if self.free < self.devices else ""
        return f"{self.devices} devices{used}{''.join(f', {label}' for label in own)}"


def machines_of(plan: Plan) -> tuple[Machine, ...]:
    """All machines of the plan, in the order of their numbers."""
    found = [(group, number) for group in plan.groups for number in range(group.count)]
    return tuple(
        Machine(number, group.name, group.devices, group.tags, group.labels) for number, (group, _) in enumerate(found)
    )


def assign(machines: Sequence[Machine], nodes: Sequence[ClusterNode]) -> dict[int, str]:
    """Node ids by machine number; machines that found no room are left out.

    The machine with the fewest nodes to choose from comes first, then the larger; it takes the node with
    the least room left, and of those the one with the fewest labels it did not ask for, then the first. In one
    group machines come in their order, so that ranks follow the order of `nodes`.
    """
    room = {node.node_id: node.free for node in nodes}
    choices = {m.number: sum(node.carries(m) for node in nodes) for m in machines}
    found: dict[int, str] = {}
    for machine in sorted(machines, key=lambda m: (choices[m.number], -m.devices, m.number)):
        fits = [n for n in nodes if n.carries(machine) and room[n.node_id] >= machine.devices]
        if fits:
            best = min(fits, key=lambda n: (room[n.node_id], len(n.labels)))
            room[best.node_id] -= machine.devices
            found[machine.number] = best.node_id
    return found


def described(machine: Machine, nodes: Sequence[ClusterNode]) -> str:
    """What stands between a machine and the cluster: the first label that no node has, or the room."""
    having = [node for node in nodes if node.devices]
    has = "; ".join(_counted([str(node) for node in having])) or "no node with devices"
    for label in machine.labels:
        if not any(label in node.labels for node in nodes):
            return f"no node has the label {label[0]}={label[1]} (the cluster has {has})"
    if not any(node.carries(machine) for node in nodes):
        return f"no node with its labels has {machine.devices} devices (the cluster has {has})"
    return f"other machines of the run, or other jobs, have the nodes that would do (the cluster has {has})"


def _counted(texts: Sequence[str]) -> list[str]:
    counts: Mapping[str, int] = {text: texts.count(text) for text in dict.fromkeys(texts)}
    return [text if count == 1 else f"{count} x {text}" for text, count in counts.items()]
