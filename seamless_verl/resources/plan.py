"""The placement plan: which device does what, before anything starts.

Invariant: numbers of devices run from 0; replicas are disjoint and never lie on two groups; a hybrid replica's devices
are the trainer's ranks [rank x size, (rank + 1) x size).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from seamless_verl.errors import IntegrityError
from seamless_verl.resources.memory import DeviceRoles, HostPeak, MemoryFacts, Peak, device_peak, host_peaks
from seamless_verl.resources.parallel import ParallelSizes, ReplicaSizes
from seamless_verl.resources.placement import (
    TRAINER_POOL,
    PlannedDevice,
    PlannedReplica,
    ReplicaKind,
    RolePlace,
    Roles,
    all_devices,
    all_replicas,
    place_roles,
    trainer_ranks,
    verl_fields,
)
from seamless_verl.resources.tags import CRITIC, ROLLOUT, TRAIN, Layout, MachineGroup, Resources


@dataclass(frozen=True)
class TrainerPlan:
    """Device numbers in the order of ranks, and the process counts along each axis."""

    devices: tuple[int, ...]
    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int


@dataclass(frozen=True)
class DevicePeak:
    """The most that a device needs, in bytes; `parts` of it are certain, `may_add` the longest micro-batch's."""

    device: int
    phase: str
    parts: tuple[tuple[str, int], ...]
    may_add: int

    @property
    def peak(self) -> Peak:
        return Peak(self.phase, self.parts, self.may_add)


@dataclass(frozen=True)
class Plan:
    """What each device does. `fields` are verl's own settings that follow; `device_bytes`, `memory`, `host_bytes` and
    `hosts` are empty when the model's size is not known; with `shared_memory` the devices of a machine share
    `device_bytes`."""

    layout: Layout
    groups: tuple[MachineGroup, ...]
    devices: tuple[PlannedDevice, ...]
    trainer: TrainerPlan
    replicas: tuple[PlannedReplica, ...]
    places: tuple[RolePlace, ...]
    fields: tuple[tuple[str, int | bool], ...]
    parameters: int | None = None
    device_bytes: int | None = None
    shared_memory: bool = False
    memory: tuple[DevicePeak, ...] = ()
    host_bytes: int | None = None
    hosts: tuple[HostPeak, ...] = ()

    @property
    def unused(self) -> tuple[PlannedDevice, ...]:
        """Devices that no part of the run needs."""
        busy = {*self.trainer.devices, *(n for replica in self.replicas for n in replica.devices)}
        busy |= {number for place in self.places for number in place.devices}
        return tuple(device for device in self.devices if device.number not in busy)

    def replicas_of(self, kind: ReplicaKind) -> tuple[PlannedReplica, ...]:
        return tuple(replica for replica in self.replicas if replica.kind is kind)

    def check_integrity(self) -> None:
        """Raises IntegrityError when a device is counted twice, or not as its tags say."""

        def check_equal(law: str, expected: int, found: int) -> None:
            if expected != found:
                raise IntegrityError(law, expected, found)

        numbers = [n for replica in self.replicas for n in replica.devices]
        check_equal("devices of replicas are distinct", len(numbers), len(set(numbers)))
        tagged = sum(ROLLOUT in device.tags for device in self.devices)
        check_equal("every device tagged rollout is in a replica", tagged, len(numbers))
        tagged = sum(TRAIN in device.tags for device in self.devices)
        check_equal("every device tagged train is a rank of the trainer", tagged, len(set(self.trainer.devices)))
        size = self.trainer.tensor * self.trainer.pipeline * self.trainer.context * self.trainer.data
        check_equal("the trainer's axes multiply to its ranks", len(self.trainer.devices), size)
        for replica in self.replicas_of(ReplicaKind.HYBRID):
            start = replica.rank * len(replica.devices)
            ranks = self.trainer.devices[start : start + len(replica.devices)]
            check_equal(f"hybrid replica {replica.rank} is on its ranks", 0, int(ranks != replica.devices))


def make_plan(
    resources: Resources,
    sizes: ParallelSizes,
    replica: ReplicaSizes,
    roles: Roles,
    memory: MemoryFacts | None = None,
) -> Plan:
    """The plan of a run on these machines; `memory` None leaves the memory out.

    Raises:
        ConfigError: sizes that do not fit a group, or a role without a place. `memory_problems` checks the memory.
    """
    sizes.check(resources.tagged(TRAIN))
    replica.check(resources.tagged(ROLLOUT))
    devices = all_devices(resources)
    places = place_roles(resources, devices, roles)
    ranks = trainer_ranks(resources, devices)
    data = sizes.data(len(ranks))
    plan = Plan(
        layout=resources.layout,
        groups=resources.groups,
        devices=devices,
        trainer=TrainerPlan(ranks, sizes.tensor, sizes.pipeline, sizes.context, sizes.expert, data),
        replicas=all_replicas(resources, devices, replica.size),
        places=places,
        fields=tuple(verl_fields(resources, replica=replica.size, needed=roles.tags).items()),
        parameters=None if memory is None else memory.actor.parameters,
        device_bytes=None if memory is None else memory.device_bytes,
        shared_memory=memory is not None and memory.shared,
        memory=() if memory is None else _peaks(devices, places, sizes, len(ranks), replica, memory),
        host_bytes=None if memory is None else memory.host_bytes,
        hosts=() if memory is None else host_peaks(memory, devices, ranks, sizes, replica),
    )
    plan.check_integrity()
    return plan


def _peaks(
    devices: tuple[PlannedDevice, ...],
    places: tuple[RolePlace, ...],
    sizes: ParallelSizes,
    world: int,
    replica: ReplicaSizes,
    facts: MemoryFacts,
) -> tuple[DevicePeak, ...]:
    critic = {n for place in places if place.tag == CRITIC and place.pool == TRAINER_POOL for n in place.devices}
    transfers = any(ROLLOUT in device.tags and TRAIN not in device.tags for device in devices)
    found = []
    for device in devices:
        trains, generates = TRAIN in device.tags, ROLLOUT in device.tags
        roles = DeviceRoles(trains, generates, device.number in critic, transfers and (trains or generates))
        peak = device_peak(facts, roles, sizes, world, replica)
        found.append(DevicePeak(device.number, peak.phase, peak.parts, peak.may_add))
    return tuple(found)


FORMAT = 1


def plan_to_json(plan: Plan) -> str:
    """The plan and the version of its format, indented."""
    return json.dumps({"format": FORMAT, "plan": asdict(plan)}, indent=1)
