"""Each kind of device through a step: what is on it while it generates, while weights move, while it trains.

On a device that does both (verl/workers/engine_workers.py `update_weights`): while it generates, the
trainer's state stays unless it is offloaded; while weights move, the trainer's weights, the engine's
weights and the buckets are there, and the cache is not yet; while it trains, an engine that sleeps is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from seamless_verl.resources.memory import (
    FIXED,
    EngineMemory,
    Peak,
    TrainingMemory,
    activations,
    engine_state,
    peak,
    trainer_state,
)
from seamless_verl.resources.model_facts import ModelFacts
from seamless_verl.resources.parallel import ParallelSizes, ReplicaSizes

GENERATES, SWITCHES, TRAINS, IDLE = "generate", "switch", "train", "idle"
RESIDENT = {"weights": "param", "reference": "param", "gradients": "param", "optimizer": "optimizer"}


@dataclass(frozen=True)
class MemoryFacts:
    """Everything that the estimate reads. `device_bytes`: memory of one device, None when not known;
    `shared`: that all devices of a machine share it, as they do a host's."""

    actor: ModelFacts
    training: TrainingMemory
    engine: EngineMemory
    bucket_bytes: int
    device_bytes: int | None = None
    shared: bool = False
    critic: ModelFacts | None = None


@dataclass(frozen=True)
class DeviceRoles:
    """What one device does, as far as memory goes."""

    trains: bool
    generates: bool
    critic: bool = False


def device_peak(
    facts: MemoryFacts, roles: DeviceRoles, sizes: ParallelSizes, world: int, replica: ReplicaSizes
) -> Peak:
    """The phase in which the device certainly needs most, what it needs there, and what any phase may add."""
    phases = _phases(facts, roles, sizes, world, replica)
    if not phases:
        return Peak(IDLE, ())
    most = max(phases, key=lambda phase: phase.certain)
    return replace(most, may_add=max(phase.bound for phase in phases) - most.certain)


def _phases(
    facts: MemoryFacts, roles: DeviceRoles, sizes: ParallelSizes, world: int, replica: ReplicaSizes
) -> list[Peak]:
    trainer: dict[str, int] = {}
    if roles.trains:
        trainer = trainer_state(facts.actor, sizes, world, facts.training)
    if roles.critic and facts.critic is not None:
        of_critic = trainer_state(facts.critic, sizes, world, facts.training)
        trainer["critic"] = sum(of_critic.values()) - of_critic["reference"]
    engine = engine_state(facts.actor, replica, facts.engine, facts.device_bytes) if roles.generates else {}
    fixed = {"processes": FIXED * (bool(trainer) + bool(engine))}
    buckets = {"buckets": 2 * facts.bucket_bytes} if roles.trains or roles.generates else {}
    stays = _resident(trainer, facts)
    awake, weights = engine, {name: size for name, size in engine.items() if name != "KV cache"}
    asleep = {} if facts.engine.sleeps else engine
    found = []
    if engine:
        found.append(peak(GENERATES, {**fixed, **stays, **awake}))
    if buckets:
        moving = weights if facts.engine.sleeps else engine
        found.append(peak(SWITCHES, {**fixed, **stays, "weights": trainer.get("weights", 0), **moving, **buckets}))
    if trainer:
        certain = activations(facts.actor, sizes, facts.training.sequence, facts.training)
        most = activations(facts.actor, sizes, facts.training.tokens, facts.training)
        at_work = {**fixed, **trainer, **asleep, "activations": certain}
        found.append(peak(TRAINS, at_work, max(0, most - certain)))
    return found


def _resident(trainer: dict[str, int], facts: MemoryFacts) -> dict[str, int]:
    """What of the trainer stays while it does not train; offloading moves it, but not off a host's own memory."""
    offloaded = {"param": facts.training.param_offload, "optimizer": facts.training.optimizer_offload}
    if facts.shared:
        return trainer
    return {name: size for name, size in trainer.items() if not offloaded.get(RESIDENT.get(name, ""), False)}
