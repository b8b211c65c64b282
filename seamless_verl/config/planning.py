"""Makes the placement plan of a config: reads from verl's keys and ours what the resources package needs.

With `seamless.handover=auto` the hand-over follows from the memory of a first plan, in which both sides stay.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from seamless_verl.config.model import MODEL, WITHOUT_TE, model_config
from seamless_verl.config.roles import (
    ENGINE_KWARGS,
    MEGATRON,
    engine_option,
    has_hybrid_rollout,
    has_reward_model,
    has_standalone_rollout,
    has_teacher,
    joins_cluster,
    needs_critic,
    needs_reference,
    replica_sizes,
    trainer_sizes,
    trains_adapter,
    uses_megatron,
)
from seamless_verl.config.schema import Handover
from seamless_verl.config.settings import Config, Settings
from seamless_verl.resources.memory import EngineMemory, MemoryFacts, TrainingMemory
from seamless_verl.resources.memory_fit import both_sides, gigabytes, host_bytes
from seamless_verl.resources.model_facts import ModelFacts
from seamless_verl.resources.parallel import ParallelSizes
from seamless_verl.resources.placement import Roles
from seamless_verl.resources.plan import Plan, make_plan
from seamless_verl.resources.tags import REFERENCE, REWARD, ROLLOUT, TEACHER, TRAIN, MachineGroup, Resources
from seamless_verl.resources.visible_devices import VARIABLE, InstalledDevice, installed_devices, visible_devices

ACTOR, ENGINE = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def plan_of(settings: Settings) -> Plan:
    """The plan of a run: of its tags or, where it has none, of verl's own fields.

    Raises ConfigError when there is no plan.
    """
    return _plan(settings, memory_facts(settings))


def plan_by_tags(config: Config) -> Plan | None:
    """Who is where in a run by tags, without its memory; None of a run without tags."""
    settings = Settings.of(config, devices=None, accelerator=True)
    return None if settings.seamless.resources is None else _plan(settings, None)


def _plan(settings: Settings, facts: MemoryFacts | None) -> Plan:
    parts = resources_of(settings), parallel_sizes(settings), replica_sizes(settings), roles_of(settings)
    return make_plan(*parts, facts)


def parallel_sizes(settings: Settings) -> ParallelSizes:
    return trainer_sizes(settings) or ParallelSizes()


HANDOVER, FREES = "seamless.handover", f"{ENGINE}.free_cache_engine"
HEADROOM = 0.9  # of a device's memory: what allocators, CUDA graphs and NCCL take is not in the estimate


@dataclass(frozen=True)
class HandoverChoice:
    """How devices change hands in a run, and why."""

    handover: Handover
    reason: str

    def __str__(self) -> str:
        return f"{HANDOVER}={self.handover.value}: {self.reason}"


def choose_handover(settings: Settings) -> HandoverChoice:
    """As set where a device both trains and generates; AUTO is decided by the memory plan, and comes to RESIDENT or
    RELEASED.

    Both sides stay where they fit into HEADROOM of each device with the longest micro-batch, or where nothing would be
    released. The memory of a model that is not here is not known: where it must be here, the checks refuse it. Raises
    ConfigError when there is no plan.
    """
    settings = replace(settings, unmade=True)
    asked = settings.seamless.handover
    if asked is not Handover.AUTO and has_hybrid_rollout(settings):
        return HandoverChoice(asked, "as set")
    if not settings.host.accelerator:
        return HandoverChoice(Handover.RESIDENT, "both sides share the host's memory on the CPU platform")
    if not settings.flag(FREES, True) or not settings.flag(f"{ENGINE}.enable_sleep_mode", True):
        return HandoverChoice(Handover.RESIDENT, f"nothing is released with {FREES}=False or without sleep mode")
    if not has_hybrid_rollout(settings):
        return HandoverChoice(Handover.RESIDENT, "no device both trains and generates")
    return _by_memory(settings)


def _by_memory(settings: Settings) -> HandoverChoice:
    facts = memory_facts_with(settings, Handover.RESIDENT)
    fullest = None if facts is None else both_sides(_plan(settings, facts))
    if facts is None or fullest is None:
        return HandoverChoice(Handover.RELEASED, f"the trainer's memory is not known, and {FREES}=True")
    if facts.device_bytes is None:
        way_out = "seamless.device_memory_gb states it"
        return HandoverChoice(Handover.RELEASED, f"the devices' memory is not known ({way_out}), and {FREES}=True")
    bound, has = gigabytes(fullest.peak.bound), gigabytes(facts.device_bytes)
    needed = f"trainer and engine together need up to {bound} of {has}"
    if fullest.peak.bound <= HEADROOM * facts.device_bytes:
        return HandoverChoice(Handover.RESIDENT, f"both fit, {needed}")
    return HandoverChoice(Handover.RELEASED, f"{needed}, of which {HEADROOM:.0%} may be planned, and {FREES}=True")


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


def roles_of(settings: Settings) -> Roles:
    return Roles(
        critic=needs_critic(settings),
        reference=needs_reference(settings) and not trains_adapter(settings),
        reward=has_reward_model(settings),
        teacher=has_teacher(settings),
    )


def memory_facts(settings: Settings) -> MemoryFacts | None:
    """None where the model's sizes cannot be read, or the trainer's memory is not known (adapters, FSDP)."""
    return memory_facts_with(settings, engines_handover(settings))


def engines_handover(settings: Settings) -> Handover:
    """What becomes of an engine's memory while the trainer computes; verl's own modes release it by `FREES`."""
    if not settings.host.accelerator:
        return Handover.RESIDENT
    if settings.mode == "seamless":
        return choose_handover(settings).handover
    sleeps = settings.flag(f"{ENGINE}.enable_sleep_mode", True) and settings.flag(FREES, True)
    return Handover.RELEASED if sleeps else Handover.RESIDENT


def memory_facts_with(settings: Settings, handover: Handover) -> MemoryFacts | None:
    """The same, with this hand-over."""
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
        engine=replace(
            engine_memory(settings), released=handover.cuts_calls, weights_stay=handover is Handover.CACHE_ONLY
        ),
        bucket_bytes=bucket * 2**20,
        device_bytes=device_bytes,
        shared=shared,
        critic=None if critic is None else ModelFacts.read(critic),
        host_bytes=None if shared else host_memory(settings),
        staged=settings.mode == "seamless",
    )


def device_memory(settings: Settings) -> tuple[int | None, bool]:
    """Bytes of a device, None where only a cluster knows, and whether all devices share them.

    Raises ConfigError for a CUDA_VISIBLE_DEVICES that does not name devices of this machine.
    """
    stated = settings.seamless.device_memory_gb
    if stated is not None:
        return int(stated * 10**9), False
    if joins_cluster(settings):
        return None, False
    if not settings.host.accelerator:
        return host_bytes(), True
    return min((device.memory_bytes for device in devices_here()), default=None), False


def devices_here() -> tuple[InstalledDevice, ...]:
    """This machine's devices that the run may use; none where the driver lists none."""
    installed = installed_devices()
    return visible_devices(installed, os.environ.get(VARIABLE)) if installed else ()


def host_memory(settings: Settings) -> int | None:
    """Bytes of a machine's own memory, as stated, else as this machine has them if it has accelerators."""
    stated = settings.seamless.host_memory_gb
    if stated is not None:
        return int(stated * 10**9)
    return host_bytes() if settings.host.accelerator and not joins_cluster(settings) and installed_devices() else None


def training_memory(settings: Settings) -> TrainingMemory:
    sizes = parallel_sizes(settings)
    longest = -(-longest_sequence(settings) // sizes.context)
    tokens = settings.integer(f"{ACTOR}.ppo_max_token_len_per_gpu", longest)
    if not settings.flag(f"{ACTOR}.use_dynamic_bsz"):
        tokens = settings.integer(f"{ACTOR}.ppo_micro_batch_size_per_gpu", 1) * longest
    recompute = settings.get(f"{MEGATRON}.override_transformer_config.recompute_granularity")
    elsewhere = resources_of(settings).tagged(REFERENCE, without=TRAIN)
    offloaded = settings.flag("actor_rollout_ref.ref.megatron.param_offload") and settings.host.accelerator
    return TrainingMemory(
        tokens=tokens,
        sequence=min(longest, tokens),
        distributed_optimizer=settings.flag(f"{MEGATRON}.use_distributed_optimizer", True),
        full_recompute=recompute == "full",
        plain_layers=settings.get(f"{MODEL}.external_lib") == WITHOUT_TE,
        sequence_parallel=settings.flag(f"{MEGATRON}.sequence_parallel", True),
        param_offload=settings.flag(f"{MEGATRON}.param_offload"),
        optimizer_offload=settings.flag(f"{MEGATRON}.optimizer_offload"),
        optimizer_on_host=_optimizer_on_host(settings),
        references=int(roles_of(settings).reference and not elsewhere),
        references_offload=offloaded,
    )


def _optimizer_on_host(settings: Settings) -> float:
    """The share of the optimizer that Megatron keeps and updates on the host."""
    given = settings.get(f"{ACTOR}.optim.override_optimizer_config", {})
    on_host = settings.host.accelerator and given.get("optimizer_cpu_offload", False)
    return float(given.get("optimizer_offload_fraction", 1.0)) if on_host else 0.0


def engine_memory(settings: Settings) -> EngineMemory:
    utilization = settings.get(f"{ENGINE}.gpu_memory_utilization", 0.5)
    cache = engine_option(settings.get(ENGINE_KWARGS), "kv_cache_memory_bytes")
    value = 4 if settings.text(f"{ENGINE}.dtype", "bfloat16") in ("float32", "float") else 2
    mtp = all(settings.get(f"{MODEL}.mtp.{name}", False) for name in ("enable", "enable_rollout"))
    return EngineMemory(
        utilization=float(utilization),
        cache_bytes=None if cache is None else int(cache),
        weight_bytes=value,
        cache_value_bytes=value,
        cache_in_switch=settings.mode == "seamless",
        kept_on_host=mtp and settings.host.accelerator,  # verl's `_resolve_sleep_level`
        longest=longest_sequence(settings),
    )


def longest_sequence(settings: Settings) -> int:
    return settings.integer("data.max_prompt_length", 512) + settings.integer("data.max_response_length", 512)


def _group(settings: Settings, node: str, name: str, tags: tuple[str, ...]) -> MachineGroup:
    return MachineGroup(name, settings.integer(f"{node}.nnodes"), settings.integer(f"{node}.n_gpus_per_node"), tags)
