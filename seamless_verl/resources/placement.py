"""Places trainer ranks, replicas and roles on numbered devices, and derives verl's own fields from that.

- Device numbers run through the groups in the user's order, machine by machine. The trainer's ranks begin with the
  devices that also generate: verl gives the replica of rank r the trainer's ranks from r x size on (`init_hybrid`).
- verl gives every optional role a whole pool, whose bundles take whole devices. So the machines of a role are either
  all of the trainer's, or none that trains or generates.
- verl sees a pool as a rectangle, nodes x devices a node. One of machines that are not alike is given as the rectangle
  of the same size whose rows divide every machine; the pool manager places the real machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import gcd
from typing import TypeAlias

from seamless_verl.errors import ConfigError
from seamless_verl.resources.tags import (
    CRITIC,
    KEY,
    REFERENCE,
    REWARD,
    ROLE_TAGS,
    ROLLOUT,
    TEACHER,
    TRAIN,
    Layout,
    MachineGroup,
    Resources,
)


@dataclass(frozen=True)
class PlannedDevice:
    """One device: `node` is the number of its machine in the run, `place` its own in the machine, both from 0."""

    number: int
    group: str
    node: int
    place: int
    tags: tuple[str, ...]


class ReplicaKind(StrEnum):
    """Whose devices a replica generates on."""

    HYBRID = "hybrid"
    """on devices that also train: it is paused while they do"""
    STANDALONE = "standalone"
    """on devices of its own"""


@dataclass(frozen=True)
class PlannedReplica:
    """One replica of verl's `rank`, on device numbers `devices`, `per_node` of them on each machine."""

    rank: int
    kind: ReplicaKind
    devices: tuple[int, ...]
    per_node: int


def all_devices(resources: Resources) -> tuple[PlannedDevice, ...]:
    machines = [group for group in resources.groups for _ in range(group.count)]
    places = [(group, node, place) for node, group in enumerate(machines) for place in range(group.devices)]
    return tuple(PlannedDevice(i, group.name, node, place, group.tags) for i, (group, node, place) in enumerate(places))


def trainer_ranks(resources: Resources, devices: tuple[PlannedDevice, ...]) -> tuple[int, ...]:
    """Device numbers in the order of the trainer's ranks."""
    order = (*trains_and_generates(resources), *resources.tagged(TRAIN, without=ROLLOUT))
    return tuple(number for group in order for number in _device_numbers(devices, [group]))


def trains_and_generates(resources: Resources) -> tuple[MachineGroup, ...]:
    return tuple(group for group in resources.tagged(TRAIN) if ROLLOUT in group.tags)


def all_replicas(resources: Resources, devices: tuple[PlannedDevice, ...], size: int) -> tuple[PlannedReplica, ...]:
    """Replicas of `size` devices each, hybrid ones first, as verl ranks them; `size` fits every group."""
    found: list[PlannedReplica] = []
    for group in (*trains_and_generates(resources), *resources.tagged(ROLLOUT, without=TRAIN)):
        kind = ReplicaKind.HYBRID if TRAIN in group.tags else ReplicaKind.STANDALONE
        numbers = _device_numbers(devices, [group])
        for start in range(0, len(numbers), size):
            own, per_node = numbers[start : start + size], min(size, group.devices)
            found.append(PlannedReplica(len(found), kind, own, per_node))
    return tuple(found)


TRAINER_POOL = "global_pool"  # verl's name


@dataclass(frozen=True)
class Roles:
    """Which of verl's optional roles the run has."""

    critic: bool = False
    reference: bool = False
    reward: bool = False
    teacher: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        needed = {CRITIC: self.critic, REFERENCE: self.reference, REWARD: self.reward, TEACHER: self.teacher}
        return tuple(tag for tag, is_needed in needed.items() if is_needed)


@dataclass(frozen=True)
class RolePlace:
    """Where the role of a tag is placed: verl's pool of that name, and its device numbers."""

    tag: str
    pool: str
    devices: tuple[int, ...]


def place_roles(resources: Resources, devices: Sequence[PlannedDevice], roles: Roles) -> tuple[RolePlace, ...]:
    """The places of the roles needed and of the user's own tags.

    Raises:
        ConfigError: a role has no machine, or machines that verl could not give it.
    """
    places = [_place_role(resources, tag, devices) for tag in roles.tags]
    by_device = {number: place for place in places if place.pool != TRAINER_POOL for number in place.devices}
    for place in places:
        other = next((by_device[n] for n in place.devices if n in by_device and by_device[n] != place), None)
        if place.pool != TRAINER_POOL and other is not None:
            reason = f"{place.tag} shares devices with {other.tag}, and each needs machines of its own"
            raise ConfigError(KEY, resources.summary(), reason, f"Give {place.tag} a group of its own")
    own = [tag for tag in resources.tags if tag not in ROLE_TAGS]
    return (*places, *(RolePlace(tag, f"{tag}_pool", _device_numbers(devices, resources.tagged(tag))) for tag in own))


def _place_role(resources: Resources, tag: str, devices: Sequence[PlannedDevice]) -> RolePlace:
    groups, trainer = resources.tagged(tag), resources.tagged(TRAIN)
    if tag == TEACHER:
        groups = resources.require(tag, "the teacher (distillation.enabled) has no place")
    if tag == REWARD and not groups and not trains_and_generates(resources):
        resources.require(tag, "the reward model has no place: where nothing pauses for it, it needs its own")
    if not groups or (set(groups) == set(trainer) and tag != TEACHER):
        return RolePlace(tag, TRAINER_POOL, _device_numbers(devices, trainer))
    _require_own_machines(resources, tag, groups)
    return RolePlace(tag, f"{tag}_pool", _device_numbers(devices, groups))


def _require_own_machines(resources: Resources, tag: str, groups: Sequence[MachineGroup]) -> None:
    """Refuse machines of a role that another part of the run uses too, or of kinds that verl cannot pool."""
    busy = next((group for group in groups if TRAIN in group.tags or ROLLOUT in group.tags), None)
    if busy is not None:
        all_or_own = "must be tags of machines of their own" if tag == TEACHER else "is for all that train, or others"
        shared = " and ".join(name for name in (TRAIN, ROLLOUT) if name in busy.tags)
        reason = f"{tag} {all_or_own}, and group {busy.name} also has {shared}"
        raise ConfigError(KEY, resources.summary(), reason, f"Give {tag} a group of its own")
    if tag == REFERENCE and resources.layout is not Layout.DISAGGREGATED:
        reason = f"verl keeps {tag} in the trainer's processes where these also generate"
        raise ConfigError(KEY, resources.summary(), reason, f"Take {tag} away from group {groups[0].name}")
    if tag in (REWARD, TEACHER) and len({group.devices for group in groups}) > 1:
        reason = f"verl's pool for {tag} has machines with equally many devices"
        raise ConfigError(KEY, resources.summary(), reason, f"Take {tag} away from the smaller groups")


def _device_numbers(devices: Sequence[PlannedDevice], groups: Sequence[MachineGroup]) -> tuple[int, ...]:
    names = {group.name for group in groups}
    return tuple(device.number for device in devices if device.group in names)


Fields: TypeAlias = dict[str, int | bool]
NODES, PER_NODE = "nnodes", "n_gpus_per_node"
TRAINER_NODE, ROLLOUT_NODE = "trainer", "actor_rollout_ref.rollout"
REWARD_NODE, TEACHER_NODE = "reward.reward_model", "distillation"


def verl_fields(resources: Resources, *, replica: int, needed: Sequence[str]) -> Fields:
    """Values by dotted key; `replica` is a replica's size in devices, `needed` the tags of optional roles."""
    trainer, standalone = resources.tagged(TRAIN), resources.tagged(ROLLOUT, without=TRAIN)
    found = _rectangle(TRAINER_NODE, trainer)
    if standalone:
        found |= _rectangle(ROLLOUT_NODE, standalone, replica)
    else:
        # verl cuts hybrid replicas into servers of so many devices.
        per_node = min((group.devices for group in trains_and_generates(resources)), default=1)
        found |= {f"{ROLLOUT_NODE}.{NODES}": 0, f"{ROLLOUT_NODE}.{PER_NODE}": per_node}
    if REWARD in needed:
        own = [group for group in resources.tagged(REWARD) if TRAIN not in group.tags]
        found[f"{REWARD_NODE}.enable_resource_pool"] = bool(own)
        found |= _rectangle(REWARD_NODE, own) if own else {}
    if TEACHER in needed:
        found |= _rectangle(TEACHER_NODE, resources.tagged(TEACHER))
    return found


def _rectangle(node: str, groups: Sequence[MachineGroup], unit: int = 1) -> Fields:
    """Rows x columns of the same size; columns fit a unit where machines differ and a unit fits each of them."""
    counts = [group.devices for group in groups]
    size = sum(group.size for group in groups)
    columns = gcd(*counts) if counts else 1
    if len(set(counts)) > 1 and all(count % unit == 0 for count in counts):
        columns = max(unit, 1) if unit > 1 else columns
    return {f"{node}.{NODES}": size // columns, f"{node}.{PER_NODE}": columns}
