"""Parallel sizes of the trainer and of a replica, and the check that machines fit them.

Sources of the counts: megatron/core/parallel_state.py `initialize_model_parallel`,
verl/workers/rollout/replica.py (a replica's size).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seamless_verl.errors import ConfigError
from seamless_verl.resources.tags import MachineGroup

MEGATRON = "actor_rollout_ref.actor.megatron"
TENSOR = f"{MEGATRON}.tensor_model_parallel_size"
ROLLOUT_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@dataclass(frozen=True)
class ParallelSizes:
    """Process counts along the trainer's axes; sequence parallelism of FSDP counts as `context`."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None  # None: as `tensor`
    context_key: str = f"{MEGATRON}.context_parallel_size"

    @property
    def model(self) -> int:
        """Processes that hold one copy of the dense layers and one sequence."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_tensors(self) -> int:
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def experts(self) -> int:
        """Processes that hold one copy of the experts."""
        return self.expert_tensors * self.expert * self.pipeline

    def data(self, world: int) -> int:
        """Data-parallel ranks among `world` processes."""
        return world // self.model

    def check(self, groups: Sequence[MachineGroup]) -> None:
        """Refuse machines among which the sizes cannot be laid out.

        Raises:
            ConfigError: the sizes do not divide the devices, or a tensor-parallel group would straddle machines.
        """
        world = sum(group.size for group in groups)
        devices = f"the {world} devices of {group_names(groups)}, tagged train"
        way_out = f"Lower it, or give train a multiple of {self.model} devices"
        if world % self.model:
            axes = f"TP {self.tensor} x PP {self.pipeline} x CP {self.context} = {self.model}"
            raise ConfigError(*self.largest(), f"{axes} does not divide {devices}", way_out)
        if world % self.experts:
            axes = f"expert TP {self.expert_tensors} x EP {self.expert} x PP {self.pipeline} = {self.experts}"
            way_out = f"Lower it, or give train a multiple of {self.experts} devices"
            key = f"{MEGATRON}.expert_model_parallel_size"
            raise ConfigError(key, self.expert, f"{axes} does not divide {devices}", way_out)
        check_unit(TENSOR, self.tensor, groups, "a tensor-parallel group")

    def largest(self) -> tuple[str, int]:
        """The key of the largest axis, and its size."""
        pipeline = f"{MEGATRON}.pipeline_model_parallel_size"
        axes = {TENSOR: self.tensor, pipeline: self.pipeline, self.context_key: self.context}
        return max(axes.items(), key=lambda axis: axis[1])


@dataclass(frozen=True)
class ReplicaSizes:
    """Processes of one replica along its axes."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        return self.tensor * self.data * self.pipeline

    def check(self, groups: Sequence[MachineGroup]) -> None:
        """Refuse groups that do not hold a whole number of replicas, none across machines that need not be."""
        what = "a replica" if self.size == self.tensor else f"a replica of TP {self.tensor} x DP {self.data}"
        check_unit(ROLLOUT_TP, self.tensor, groups, what, size=self.size)


def check_unit(key: str, value: int, groups: Sequence[MachineGroup], what: str, *, size: int | None = None) -> None:
    """Refuse the first group that is not a whole number of units of `size` devices (by default `value`).

    A unit lies on one machine, or is a whole number of machines of one group.
    """
    unit = value if size is None else size
    for group in groups:
        way_out = f"Set {key} so that it fits, or change devices or count of {group.name}"
        if unit > group.size:
            reason = f"{what} has {unit} devices, more than the {group.size} of group {group}"
            raise ConfigError(key, value, reason, way_out)
        if unit <= group.devices and group.devices % unit:
            reason = f"{what} of {unit} devices does not divide the machines of group {group}"
            raise ConfigError(key, value, reason, way_out)
        if unit > group.devices and (unit % group.devices or group.size % unit):
            reason = f"{what} of {unit} devices is not a whole number of machines of group {group}"
            raise ConfigError(key, value, reason, way_out)


def group_names(groups: Sequence[MachineGroup]) -> str:
    return " and ".join(group.name for group in groups)
