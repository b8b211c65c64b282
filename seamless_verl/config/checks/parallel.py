"""What must divide what: Megatron's sizes the trainer's world, a replica's size its pool.

Sources: megatron/core/parallel_state.py `initialize_model_parallel`, verl/workers/engine_workers.py
`init_model`, verl/workers/rollout/llm_server.py, verl/workers/config/rollout.py.
"""

from __future__ import annotations

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.roles import by_tags, has_hybrid_rollout, has_standalone_rollout, uses_megatron
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.checks.sizes import (
    MEGATRON,
    ROLLOUT,
    MegatronSizes,
    replica_world,
    standalone_devices,
    trainer_world,
)


@check
def check_trainer_parallel(settings: Settings) -> list[Problem]:
    """Megatron's sizes divide the trainer's world."""
    if not uses_megatron(settings):
        return []
    world, sizes = trainer_world(settings), MegatronSizes.read(settings)
    if by_tags(settings):
        return _virtual_pipeline(settings, sizes)  # the plan judges the sizes, group by group
    problems = []
    if world % sizes.model:
        key = f"{MEGATRON}.{_largest(sizes)}"
        reason = (
            f"TP {sizes.tensor} x PP {sizes.pipeline} x CP {sizes.context} = {sizes.model} "
            f"does not divide the trainer's {world} devices"
        )
        problems.append(Problem(key, settings.get(key), reason, _world_way_out(sizes.model)))
    # Without experts of their own these are the same axes again.
    if sizes.experts != sizes.tensor * sizes.pipeline and world % sizes.experts:
        key = f"{MEGATRON}.expert_model_parallel_size"
        reason = (
            f"expert TP {sizes.expert_tensor} x EP {sizes.expert} x PP {sizes.pipeline} = {sizes.experts} "
            f"does not divide the trainer's {world} devices"
        )
        problems.append(Problem(key, sizes.expert, reason, _world_way_out(sizes.experts)))
    return [*problems, *_virtual_pipeline(settings, sizes)]


@check
def check_rollout_parallel(settings: Settings) -> list[Problem]:
    """One replica's size divides each pool that carries replicas."""
    pools = {}
    if has_hybrid_rollout(settings):
        pools["the trainer's {} devices"] = trainer_world(settings)
    if has_standalone_rollout(settings):
        pools["the rollout pool's {} devices"] = standalone_devices(settings)
    # Prefill and decode replicas have sizes of their own.
    if settings.flag(f"{ROLLOUT}.disaggregation.enabled") or by_tags(settings):
        pools = {}
    replica = replica_world(settings)
    uneven = {text.format(size): size for text, size in pools.items() if size % replica}
    problems = [_uneven_pool(settings, replica, text, size) for text, size in uneven.items()]
    return problems + _no_pipeline(settings)


def _uneven_pool(settings: Settings, replica: int, text: str, size: int) -> Problem:
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    reason = f"a replica of {replica} (TP x DP x PP) does not divide {text}"
    way_out = f"Set {key} so that {ROLLOUT}'s TP x DP x PP divides {size}"
    return Problem(key, settings.get(key), reason, way_out)


def _largest(sizes: MegatronSizes) -> str:
    axes = {"tensor_model": sizes.tensor, "pipeline_model": sizes.pipeline, "context": sizes.context}
    return f"{max(axes, key=lambda axis: axes[axis])}_parallel_size"


def _world_way_out(unit: int) -> str:
    return f"Lower it, or make trainer.nnodes x trainer.n_gpus_per_node a multiple of {unit}"


def _virtual_pipeline(settings: Settings, sizes: MegatronSizes) -> list[Problem]:
    key = f"{MEGATRON}.virtual_pipeline_model_parallel_size"
    virtual = settings.get(key)
    if virtual is None or sizes.pipeline > 1:
        return []
    way_out = f"Remove it, or set {MEGATRON}.pipeline_model_parallel_size=2 or more"
    return [Problem(key, virtual, "needs more than one pipeline stage", way_out)]


def _no_pipeline(settings: Settings) -> list[Problem]:
    key = f"{ROLLOUT}.pipeline_model_parallel_size"
    pipeline = settings.integer(key, 1)
    if pipeline == 1:
        return []
    way_out = f"Set {key}=1 and use {ROLLOUT}.tensor_model_parallel_size"
    return [Problem(key, pipeline, "verl's rollout has no pipeline parallelism", way_out)]
