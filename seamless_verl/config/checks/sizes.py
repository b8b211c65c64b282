"""How many processes there are along each axis, as the hosts will count them.

Sources: megatron/core/parallel_state.py `initialize_model_parallel`, verl/utils/config.py
`validate_config`, verl/workers/rollout/{replica,llm_server}.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from seamless_verl.config.checks.settings import Settings

MEGATRON = "actor_rollout_ref.actor.megatron"
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class MegatronSizes:
    """Process counts along Megatron's axes."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int

    @classmethod
    def read(cls, settings: Settings) -> MegatronSizes:
        tensor = settings.integer(f"{MEGATRON}.tensor_model_parallel_size", 1)
        return cls(
            tensor=tensor,
            pipeline=settings.integer(f"{MEGATRON}.pipeline_model_parallel_size", 1),
            context=settings.integer(f"{MEGATRON}.context_parallel_size", 1),
            expert=settings.integer(f"{MEGATRON}.expert_model_parallel_size", 1),
            expert_tensor=settings.integer(f"{MEGATRON}.expert_tensor_parallel_size", tensor),
        )

    @property
    def model(self) -> int:
        """Processes that hold one copy of the dense layers and one sequence."""
        return self.tensor * self.pipeline * self.context

    @property
    def experts(self) -> int:
        """Processes that hold one copy of the experts."""
        return self.expert_tensor * self.expert * self.pipeline


def trainer_world(settings: Settings) -> int:
    """Processes, one a device, that train."""
    return settings.integer("trainer.nnodes") * settings.integer("trainer.n_gpus_per_node")


def data_parallel_size(settings: Settings) -> int | None:
    """Trainer ranks that see different sequences; None when the engine's division is not ours to know."""
    world = trainer_world(settings)
    strategy = settings.text("actor_rollout_ref.actor.strategy")
    if strategy == "megatron":
        model = MegatronSizes.read(settings).model
    elif strategy.startswith("fsdp"):
        model = settings.integer("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 1)
    else:
        return None
    return world // model if world % model == 0 else None


def replica_world(settings: Settings) -> int:
    """Processes of one rollout replica."""
    axes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    tensor, data, pipeline = (settings.integer(f"{ROLLOUT}.{axis}", 1) for axis in axes)
    return tensor * data * pipeline


def standalone_devices(settings: Settings) -> int:
    """Devices of the standalone rollout pool, 0 when the mode has none."""
    nodes = settings.integer(f"{ROLLOUT}.nnodes", 0, least=0)
    return nodes * settings.integer(f"{ROLLOUT}.n_gpus_per_node", 0, least=0)
