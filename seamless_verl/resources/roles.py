"""Where verl's other roles go: with the trainer, or to machines of their own.

verl gives every role a whole pool, and a pool's bundles take whole devices, so a role's machines are
all of the trainer's or none that trains or generates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seamless_verl.errors import ConfigError
from seamless_verl.resources.placement import Device, trains_and_generates
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
class Place:
    """Where the role of a tag is: verl's pool of that name, and its device numbers."""

    tag: str
    pool: str
    devices: tuple[int, ...]


def all_places(resources: Resources, devices: Sequence[Device], roles: Roles) -> tuple[Place, ...]:
    """Places of the roles needed and of the user's own tags.

    Raises:
        ConfigError: a role has no machine, or machines that verl could not give it.
    """
    places = [_place(resources, tag, devices) for tag in roles.tags]
    taken = {number: place for place in places if place.pool != TRAINER_POOL for number in place.devices}
    for place in places:
        other = next((taken[n] for n in place.devices if n in taken and taken[n] != place), None)
        if place.pool != TRAINER_POOL and other is not None:
            reason = f"{place.tag} shares devices with {other.tag}, and each needs machines of its own"
            raise ConfigError(KEY, resources.summary(), reason, f"Give {place.tag} a group of its own")
    own = [tag for tag in resources.tags if tag not in ROLE_TAGS]
    return (*places, *(Place(tag, f"{tag}_pool", _numbers(devices, resources.tagged(tag))) for tag in own))


def _place(resources: Resources, tag: str, devices: Sequence[Device]) -> Place:
    groups, trainer = resources.tagged(tag), resources.tagged(TRAIN)
    if tag == TEACHER:
        groups = resources.require(tag, "the teacher (distillation.enabled) has no place")
    if tag == REWARD and not groups and not trains_and_generates(resources):
        resources.require(tag, "the reward model has no place: where nothing pauses for it, it needs its own")
    if not groups or (set(groups) == set(trainer) and tag != TEACHER):
        return Place(tag, TRAINER_POOL, _numbers(devices, trainer))
    _alone(resources, tag, groups)
    return Place(tag, f"{tag}_pool", _numbers(devices, groups))


def _alone(resources: Resources, tag: str, groups: Sequence[MachineGroup]) -> None:
    """Refuse machines of a role that some other part of the run has too, or of kinds that verl cannot pool."""
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


def _numbers(devices: Sequence[Device], groups: Sequence[MachineGroup]) -> tuple[int, ...]:
    names = {group.name for group in groups}
    return tuple(device.number for device in devices if device.group in names)


__all__ = ["CRITIC", "TRAINER_POOL", "Place", "Roles", "all_places"]
