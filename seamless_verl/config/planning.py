"""Makes the placement plan of a config: reads from verl's keys and ours what the resources package needs."""

from __future__ import annotations

import os

from seamless_verl.config import engine_kwargs
from seamless_verl.config.checks.model import model_config
from seamless_verl.config.checks.roles import (
    MegatronSizes,
    has_hybrid_rollout,
    has_reward_model,
    has_standalone_rollout,
    has_teacher,
    needs_critic,
    needs_reference,
    trains_adapter,
    uses_megatron,
)
from seamless_verl.config.checks.settings import Settings
from seamless_verl.resources.memory import EngineMemory, MemoryFacts, TrainingMemory
from seamless_verl.resources.memory_fit import accelerator_bytes, host_bytes
from seamless_verl.resources.model_facts import ModelFacts
from seamless_verl.resources.parallel import ParallelSizes, ReplicaSizes
from seamless_verl.resources.placement import Roles
from seamless_verl.resources.plan import Plan, make_plan
from seamless_verl.resources.tags import REFERENCE, REWARD, ROLLOUT, TEACHER, TRAIN, MachineGroup, Resources

ACTOR, ENGINE, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MEGATRON = f"{ACTOR}.megatron"
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"


def plan_of(settings: Settings) -> Plan:
    """The plan of a run: of its tags or, where it has none, of verl's own fields.

    Raises ConfigError when there is no plan.
    """
    parts = resources_of(settings), trainer_sizes(settings), replica_sizes(settings), roles_of(settings)
    return make_plan(*parts, memory_facts(settings))


def resources_of(settings: Settings) -> Resources:
    """The machines: by tags in our trainer, else as verl's pools have them."""
    given = settings.seamless.resources if settings.mode == "seamless" else None
    if given is not None:
        return given
    tags = (TRAIN, ROLLOUT) if has_hybrid_rollout(settings) else (TRAIN,)
    groups = [_group(settings, "trainer", "trainer", tags)]
    if has_standalone_rollout(settings):
        groups.append(_group(settings, ENGINE, "rollout", (ROLLOUT,)))
    if has_reward_model(settings) and settings.flag("reward.reward_model.enable_resource_pool"):
        groups.append(_group(settings, "reward.reward_model", "reward", (REWARD,)))
    if has_teacher(settings):
        groups.append(_group(settings, "distillation", "teacher", (TEACHER,)))
    return Resources(tuple(groups))


def trainer_sizes(settings: Settings) -> ParallelSizes:
    if uses_megatron(settings):
        sizes = MegatronSizes.read(settings)
        return ParallelSizes(sizes.tensor, sizes.pipeline, sizes.context, sizes.expert, sizes.expert_tensor)
    if settings.text(f"{ACTOR}.strategy").startswith("fsdp"):
        return ParallelSizes(context=settings.integer(ULYSSES, 1), context_key=ULYSSES)
    return ParallelSizes()


def replica_sizes(settings: Settings) -> ReplicaSizes:
    """The sizes of a replica: of all its servers, where prefill and decode are apart (verl's rollout/llm_server.py)."""
    axes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    tensor, data, pipeline = (settings.integer(f"{ENGINE}.{axis}", 1) for axis in axes)
    apart = f"{ENGINE}.disaggregation"
    if settings.flag(f"{apart}.enabled"):
        decode = settings.integer(f"{apart}.decode_tensor_model_parallel_size", tensor)
        tensor *= settings.integer(f"{apart}.prefill_replicas", 1)
        tensor += decode * settings.integer(f"{apart}.decode_replicas", 1)
    return ReplicaSizes(tensor, data, pipeline)


def roles_of(settings: Settings) -> Roles:
    return Roles(
        critic=needs_critic(settings),
        reference=needs_reference(settings) and not trains_adapter(settings),
        reward=has_reward_model(settings),
        teacher=has_teacher(settings),
    )


def memory_facts(settings: Settings) -> MemoryFacts | None:
    """None where the model's sizes cannot be read, or the trainer's memory is not known (adapters, FSDP)."""
    config = model_config(settings, MODEL) if uses_megatron(settings) and not trains_adapter(settings) else None
    actor = None if config is None else ModelFacts.read(config)
    if actor is None:
        return None
    device_bytes, shared = device_memory(settings)
    critic = model_config(settings, "critic.model") if needs_critic(settings) else None
    bucket = settings.integer(f"{ENGINE}.checkpoint_engine.update_weights_bucket_megabytes", 2048)
    return MemoryFacts(
        actor=actor,
        training=training_memory(settings),
        engine=engine_memory(settings),
        bucket_bytes=bucket * 2**20,
        device_bytes=device_bytes,
        shared=shared,
        critic=None if critic is None else ModelFacts.read(critic),
    )


def device_memory(settings: Settings) -> tuple[int | None, bool]:
    """Bytes of a device, None where only a cluster knows, and whether all devices share them."""
    stated = settings.seamless.device_memory_gb
    if stated is not None:
        return int(stated * 10**9), False
    if os.environ.get("RAY_ADDRESS", "local") != "local":
        return None, False
    return (accelerator_bytes(), False) if settings.host.accelerator else (host_bytes(), True)


def training_memory(settings: Settings) -> TrainingMemory:
    sizes = trainer_sizes(settings)
    longest = -(-_longest(settings) // sizes.context)
    tokens = settings.integer(f"{ACTOR}.ppo_max_token_len_per_gpu", longest)
    if not settings.flag(f"{ACTOR}.use_dynamic_bsz"):
        tokens = settings.integer(f"{ACTOR}.ppo_micro_batch_size_per_gpu", 1) * longest
    recompute = settings.get(f"{MEGATRON}.override_transformer_config.recompute_granularity")
    tagged = resources_of(settings).tagged(REFERENCE, without=TRAIN)
    offloaded = settings.flag("actor_rollout_ref.ref.megatron.param_offload") and settings.host.accelerator
    return TrainingMemory(
        tokens=tokens,
        sequence=min(longest, tokens),
        distributed_optimizer=settings.flag(f"{MEGATRON}.use_distributed_optimizer", True),
        full_recompute=recompute == "full",
        sequence_parallel=settings.flag(f"{MEGATRON}.sequence_parallel", True),
        param_offload=settings.flag(f"{MEGATRON}.param_offload"),
        optimizer_offload=settings.flag(f"{MEGATRON}.optimizer_offload"),
        references=int(roles_of(settings).reference and not tagged and not offloaded),
    )


def engine_memory(settings: Settings) -> EngineMemory:
    utilization = settings.get(f"{ENGINE}.gpu_memory_utilization", 0.5)
    cache = engine_kwargs.given(settings.get(engine_kwargs.KEY), "kv_cache_memory_bytes")
    value = 4 if settings.text(f"{ENGINE}.dtype", "bfloat16") in ("float32", "float") else 2
    sleeps = settings.flag(f"{ENGINE}.enable_sleep_mode", True) and settings.flag(f"{ENGINE}.free_cache_engine", True)
    return EngineMemory(
        utilization=float(utilization),
        cache_bytes=None if cache is None else int(cache),
        weight_bytes=value,
        cache_value_bytes=value,
        sleeps=sleeps and settings.host.accelerator,
        longest=_longest(settings),
    )


def _longest(settings: Settings) -> int:
    return settings.integer("data.max_prompt_length", 512) + settings.integer("data.max_response_length", 512)


def _group(settings: Settings, node: str, name: str, tags: tuple[str, ...]) -> MachineGroup:
    return MachineGroup(name, settings.integer(f"{node}.nnodes"), settings.integer(f"{node}.n_gpus_per_node"), tags)
