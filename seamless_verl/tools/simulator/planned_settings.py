"""A plan that was found by search as settings: of a run, and as arms of a comparison that tries the best ones."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from seamless_verl.config.checks.roles import ROLLOUT_KEY, pool_backend
from seamless_verl.config.checks.settings import Settings
from seamless_verl.resources.placement import verl_fields
from seamless_verl.resources.tags import KEY as RESOURCES
from seamless_verl.resources.tags import ROLLOUT, TRAIN, MachineGroup, Resources
from seamless_verl.tools.simulator.optimize import PlanCandidate

MEGATRON = "actor_rollout_ref.actor.megatron"


@dataclass(frozen=True)
class AlikeMachines:
    """`count` machines of `devices` devices each; `backend` carries weights to devices that only generate."""

    count: int
    devices: int
    backend: str = "nccl"

    @property
    def size(self) -> int:
        return self.count * self.devices


def backend_of(settings: Settings) -> str:
    """How weights would reach devices that only generate."""
    backend = settings.get(f"{ROLLOUT_KEY}.checkpoint_engine.backend")
    return pool_backend(backend, accelerator=settings.host.accelerator)


def planned_resources(candidate: PlanCandidate, machines: AlikeMachines) -> Resources:
    """The candidate's machines with their tags."""
    tags = (TRAIN, ROLLOUT) if candidate.shared else (TRAIN,)
    parts = [("trainer", candidate.training, tags), ("rollout", candidate.generating, (ROLLOUT,))]
    groups = []
    for name, units, of in parts:
        devices = units * candidate.unit.size
        if devices and devices % machines.devices == 0:
            groups.append(MachineGroup(name, devices // machines.devices, machines.devices, of))
        elif devices:
            groups.append(MachineGroup(name, 1, devices, of))
    return Resources(tuple(groups))


def settings_of(candidate: PlanCandidate, machines: AlikeMachines) -> list[str]:
    """The candidate as overrides of a run, with which its plan is this one; also how weights travel, where they do.

    verl's own fields of machines are among them, for a job that has others would contradict the tags.
    """
    resources = planned_resources(candidate, machines)
    groups = [
        f"{{count: {group.count}, devices: {group.devices}, tags: [{', '.join(group.tags)}]}}"
        for group in resources.groups
    ]
    settings = [f"{RESOURCES}=[{', '.join(groups)}]", "seamless.layout=auto"]
    fields = verl_fields(resources, replica=candidate.unit.size, needed=())
    settings += [f"{key}={value}" for key, value in fields.items()]
    settings.append(f"{ROLLOUT_KEY}.tensor_model_parallel_size={candidate.unit.size}")
    if candidate.sizes is not None:
        tensor, pipeline = candidate.sizes
        settings.append(f"{MEGATRON}.tensor_model_parallel_size={tensor}")
        settings.append(f"{MEGATRON}.pipeline_model_parallel_size={pipeline}")
    settings += [f"{ROLLOUT_KEY}.checkpoint_engine.backend={machines.backend}"] if candidate.generating else []
    settings.append(f"trainer.v1.seamless.parameter_sync_step={candidate.updates}")
    settings.append(f"seamless.max_staleness={candidate.max_staleness}")
    return settings


def comparison_of(candidates: Sequence[PlanCandidate], machines: AlikeMachines, job: Sequence[str]) -> str:
    """The command that runs the first candidate of each layout, three times; `job` are its words.

    The job has the settings of the first candidate, too: it is checked without an arm before the arms are.
    """
    best = dict[str, PlanCandidate]()
    for candidate in candidates:
        best.setdefault(candidate.layout, candidate)
    arms = [":".join([layout, *settings_of(candidate, machines)]) for layout, candidate in best.items()]
    first = settings_of(candidates[0], machines)
    words = ["seamless-verl", "compare", *job, *first, "--arms", ",".join(arms), "--seeds", "1", "--rounds", "3"]
    return shlex.join(words)
