"""Devices by number, and the replicas on them.

Numbers run through the groups in the user's order, machine by machine. The trainer's ranks begin with
the devices that also generate, because verl gives the replica of rank r the trainer's ranks from
r x size on (verl/workers/rollout/replica.py `init_hybrid`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from seamless_verl.resources.tags import ROLLOUT, TRAIN, MachineGroup, Resources


@dataclass(frozen=True)
class Device:
    """One device: `node` counts the machines of the run, `place` the devices of the machine, all from 0."""

    number: int
    group: str
    node: int
    place: int
    tags: tuple[str, ...]


class ReplicaKind(str, Enum):
    """Whose devices a replica generates on."""

    HYBRID = "hybrid"
    """on devices that also train: it gives way while they do"""
    STANDALONE = "standalone"
    """on devices of its own"""


@dataclass(frozen=True)
class Replica:
    """One replica of verl's `rank`, on device numbers `devices`, `per_node` of them on each machine."""

    rank: int
    kind: ReplicaKind
    devices: tuple[int, ...]
    per_node: int


def all_devices(resources: Resources) -> tuple[Device, ...]:
    return tuple(_devices(resources))


def trainer_ranks(resources: Resources, devices: tuple[Device, ...]) -> tuple[int, ...]:
    """Device numbers in the order of the trainer's ranks."""
    order = (*trains_and_generates(resources), *resources.tagged(TRAIN, without=ROLLOUT))
    return tuple(device.number for group in order for device in devices if device.group == group.name)


def trains_and_generates(resources: Resources) -> tuple[MachineGroup, ...]:
    return tuple(group for group in resources.tagged(TRAIN) if ROLLOUT in group.tags)


def all_replicas(resources: Resources, devices: tuple[Device, ...], size: int) -> tuple[Replica, ...]:
    """Replicas of `size` devices each, hybrid ones first, as verl ranks them; `size` fits every group."""
    found: list[Replica] = []
    kinds = (
        (ReplicaKind.HYBRID, trains_and_generates(resources)),
        (ReplicaKind.STANDALONE, resources.tagged(ROLLOUT, without=TRAIN)),
    )
    for kind, groups in kinds:
        for group in groups:
            numbers = [device.number for device in devices if device.group == group.name]
            starts = range(0, len(numbers), size)
            per_node = min(size, group.devices)
            found += [
                Replica(len(found) + i, kind, tuple(numbers[start : start + size]), per_node)
                for i, start in enumerate(starts)
            ]
    return tuple(found)


def _devices(resources: Resources) -> Iterator[Device]:
    number = node = 0
    for group in resources.groups:
        for _ in range(group.count):
            for place in range(group.devices):
                yield Device(number, group.name, node, place, group.tags)
                number += 1
            node += 1
