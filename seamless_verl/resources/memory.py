"""Estimates what each device needs at its peak, and each machine beside its devices, in bytes, before anything starts.

All sizes are one process's share. The sources:
- weights, gradients, optimizer: Megatron-Core's table for its distributed optimizer (docs, `dist_optimizer`):
  bf16 weights (2), fp32 gradients (4), and fp32 weights and two moments (12) divided among the data-parallel
  ranks, which is ZeRO's K = 12 (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1);
- activations: Korthikanti et al. 2022 (arXiv 2205.05198), section 4, counted for RMSNorm, gated MLPs, grouped queries,
  fused attention that keeps no scores, no dropout. A token of a layer keeps 2 bytes of: both norms' inputs and outputs
  (4 hidden), query, key, value, attention's output (2 qkv at most), and four inner widths of the MLP. Full
  recomputation keeps the layer's input, and one layer at a time. Layers in plain torch
  (`platform=accelerator_without_te`) keep PLAIN_LAYERS times as much, measured on an H100 with Qwen3-0.6B's layers:
  69.9 KB a token and layer, where this counts 49.2 (tests/gpu/README.md). Pipelining does not lessen them: the first of
  p stages keeps p micro-batches of 1/p of the layers. Logits and their gradient are in fp32 (section 4.3: 4sbv, twice);
- KV cache: 2 x layers x kv heads x head size x bytes a token (`ModelFacts.cache_width`);
- transfer to replicas on devices of their own: two buckets on each device of the trainer and of these replicas, one
  filled while the other is sent (verl/checkpoint_engine/nccl_checkpoint_engine.py `prepare`); a load from the host's
  memory: one bucket on an engine's device;
- an engine takes `gpu_memory_utilization` of the device for weights, cache and its own activations together,
  or, given `kv_cache_memory_bytes`, that beside its weights (vllm/v1/worker/gpu_worker.py);
- FIXED for each process's own: a context and its libraries.

The peak is the largest of three phases of a step. On a device that trains and generates: while it generates, the
trainer's state stays unless it is offloaded; while weights are staged, sent or loaded, it holds the trainer's weights,
the engine, which may have its cache, and the buckets; while it trains, it holds nothing of an engine that was released,
or only its weights (`cache_only`). In verl's own modes an engine has no cache yet when it receives weights
(verl/workers/engine_workers.py `update_weights`).

Of a machine's memory, by what needs it:
- staged weights: one copy of a version on each host that loads it (weights/staging.py), in the trainer's dtype. The
  trainer's hosts stage it where replicas share the trainer's devices; else only the host of rank 0 does, and other
  hosts keep one copy of what they are sent;
- offloaded: what the trainer's ranks put away (`param_offload`, `optimizer_offload`), each its own share, pinned;
- the optimizer, or a share of it, where Megatron keeps and updates it on the host (`optimizer_cpu_offload`);
- engine copies: weights that engines keep in the host's memory while they sleep (vLLM's sleep level 1);
- processes: one for each rank of the trainer and of an engine (PROCESS).
Not counted: Ray's object store, TransferQueue's rows, data sets, and what users' agents need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from seamless_verl.resources.model_facts import ModelFacts
from seamless_verl.resources.parallel import ParallelSizes, ReplicaSizes
from seamless_verl.resources.placement import PlannedDevice
from seamless_verl.resources.tags import ROLLOUT, TRAIN

WEIGHT, GRADIENT, OPTIMIZER, LOGIT = 2, 4, 12, 4  # bytes a parameter or value
FIXED = 512 * 2**20
PLAIN_LAYERS = 1.42


@dataclass(frozen=True)
class TrainingMemory:
    """The settings that decide the trainer's memory. `tokens`: at most, in a micro-batch of one device; `sequence`:
    at most, in one sequence, which is certain to occur; `references`: further copies of the weights."""

    tokens: int
    sequence: int
    distributed_optimizer: bool = True
    full_recompute: bool = False
    plain_layers: bool = False
    """whether the layers are in plain torch, which keeps more for the backward pass"""
    sequence_parallel: bool = True
    param_offload: bool = False
    optimizer_offload: bool = False
    optimizer_on_host: float = 0.0
    """the share of the optimizer that stays on the host (Megatron's `optimizer_cpu_offload`)"""
    references: int = 0
    references_offload: bool = False
    """whether these copies are in the host's memory"""


@dataclass(frozen=True)
class EngineMemory:
    """The settings that decide an engine's memory. The cache has `cache_bytes` on a device if given; else the engine
    takes the share `utilization` of it in all."""

    utilization: float = 0.5
    cache_bytes: int | None = None
    weight_bytes: int = 2
    cache_value_bytes: int = 2
    released: bool = True
    """whether its cache leaves the device while the trainer computes (`seamless.handover`)"""
    weights_stay: bool = False
    """whether its weights do not leave with it"""
    cache_in_switch: bool = True
    """whether its cache may lie on the device while weights are staged, sent or loaded"""
    kept_on_host: bool = False
    """whether its weights are copied to the host when they leave the device: vLLM's sleep level 1"""
    longest: int = 0
    """tokens of the longest sequence, which the cache must hold"""


@dataclass(frozen=True)
class Peak:
    """One device's needs in bytes by part; `certain` leaves out what the longest micro-batch may add."""

    phase: str
    parts: tuple[tuple[str, int], ...]
    may_add: int = 0

    @property
    def certain(self) -> int:
        return sum(size for _, size in self.parts)

    @property
    def bound(self) -> int:
        return self.certain + self.may_add


def local_parameters(model: ModelFacts, sizes: ParallelSizes) -> tuple[int, int]:
    """Parameters of the fullest rank: (all but the experts, the experts); the latter shard by themselves."""
    layers = -(-model.layers // sizes.pipeline)
    sparse = min(layers, model.moe_layers)
    dense = min(layers, model.dense_layers) if model.dense_mlp > model.shared else layers - sparse
    kept = layers * (model.attention // sizes.tensor + model.replicated)
    kept += (dense * model.dense_mlp + sparse * model.shared) // sizes.tensor + sparse * model.router
    head = model.head if model.head or sizes.pipeline == 1 else model.embedding  # the last stage's own copy
    ends = model.embedding + head if sizes.pipeline == 1 else max(model.embedding, head)
    experts = sparse * model.experts // (sizes.expert_tensors * sizes.expert)
    return kept + ends // sizes.tensor + model.hidden, experts


def trainer_state(model: ModelFacts, sizes: ParallelSizes, world: int, settings: TrainingMemory) -> dict[str, int]:
    """Bytes of a trainer's rank at work, but for activations."""
    common, experts = local_parameters(model, sizes)
    shards = sizes.data(world) * sizes.context if settings.distributed_optimizer else 1
    expert_shards = world // sizes.experts if settings.distributed_optimizer else 1
    return {
        "weights": WEIGHT * (common + experts),
        "reference": WEIGHT * (common + experts) * settings.references,
        "gradients": GRADIENT * (common + experts),
        "optimizer": OPTIMIZER * (-(-common // shards) + -(-experts // expert_shards)),
    }


def activations(model: ModelFacts, sizes: ParallelSizes, tokens: int, settings: TrainingMemory) -> int:
    """Bytes kept for the backward pass of `tokens` tokens on one rank, logits included."""
    across = sizes.tensor if settings.sequence_parallel else 1
    wide = 2 * model.qkv_width + 4 * model.mlp_width
    layer = 2 * (4 * model.hidden // across + wide // sizes.tensor)
    layer = int(PLAIN_LAYERS * layer) if settings.plain_layers else layer
    layers = 2 * model.hidden // across * model.layers + layer if settings.full_recompute else layer * model.layers
    return tokens * (layers + 2 * LOGIT * model.vocabulary // sizes.tensor)


def engine_weights(model: ModelFacts, sizes: ReplicaSizes, settings: EngineMemory) -> int:
    """Bytes of the weights on one device; data-parallel ranks share the experts of a mixture."""
    experts = model.moe_layers * model.experts
    rest = model.parameters - experts
    ranks = sizes.tensor * sizes.pipeline
    return settings.weight_bytes * (-(-rest // ranks) + -(-experts // (ranks * sizes.data)))


def cache_bytes_per_token(model: ModelFacts, sizes: ReplicaSizes, settings: EngineMemory) -> int:
    """Bytes of the KV cache for one token on one device."""
    ranks = min(sizes.tensor, model.cache_heads)
    return settings.cache_value_bytes * model.cache_width * model.layers // (ranks * sizes.pipeline)


def engine_state(
    model: ModelFacts, sizes: ReplicaSizes, settings: EngineMemory, device_bytes: int | None
) -> dict[str, int]:
    """Bytes of one rank of an engine that generates; with an unknown device the cache counts one sequence."""
    weights = engine_weights(model, sizes, settings)
    least = settings.longest * cache_bytes_per_token(model, sizes, settings)
    if settings.cache_bytes is not None:
        return {"engine weights": weights, "KV cache": settings.cache_bytes}
    share = 0 if device_bytes is None else int(settings.utilization * device_bytes)
    return {"engine weights": weights, "KV cache": max(least, share - weights)}


def peak(phase: str, parts: Mapping[str, int], may_add: int = 0) -> Peak:
    return Peak(phase, tuple((name, size) for name, size in parts.items() if size), may_add)


GENERATES, SWITCHES, TRAINS, IDLE = "generate", "switch", "train", "idle"
RESIDENT = {"weights": "param", "reference": "param", "gradients": "param", "optimizer": "optimizer"}


@dataclass(frozen=True)
class MemoryFacts:
    """Everything that the estimate reads. `device_bytes`: memory of one device, None when not known;
    `shared`: whether all devices of a machine share it, as they do on a host."""

    actor: ModelFacts
    training: TrainingMemory
    engine: EngineMemory
    bucket_bytes: int
    device_bytes: int | None = None
    shared: bool = False
    critic: ModelFacts | None = None
    host_bytes: int | None = None
    """memory of one machine, None when not known"""
    staged: bool = True
    """whether weights are staged in the hosts' memory, as our trainer does it"""


@dataclass(frozen=True)
class DeviceRoles:
    """What one device does that needs memory."""

    trains: bool
    generates: bool
    critic: bool = False
    transfers: bool = False
    """whether it sends weights to another device, or receives them from one"""


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
        trainer = on_device(trainer_state(facts.actor, sizes, world, facts.training), facts.training)
    if roles.critic and facts.critic is not None:
        of_critic = trainer_state(facts.critic, sizes, world, facts.training)
        trainer["critic"] = sum(of_critic.values()) - of_critic["reference"]
    engine = engine_state(facts.actor, replica, facts.engine, facts.device_bytes) if roles.generates else {}
    fixed = {"processes": FIXED * (bool(trainer) + bool(engine))}
    stays = _resident(trainer, facts)
    hands_over = bool(trainer) and facts.engine.released
    found = []
    if engine:
        found.append(peak(GENERATES, {**fixed, **stays, **engine}))
    if buckets := facts.bucket_bytes * (2 if roles.transfers else bool(engine)):
        has_cache = facts.engine.cache_in_switch or not hands_over
        moving = {name: size for name, size in engine.items() if has_cache or name != "KV cache"}
        weights = trainer.get("weights", 0)
        found.append(peak(SWITCHES, {**fixed, **stays, "weights": weights, **moving, "buckets": buckets}))
    if trainer:
        certain = activations(facts.actor, sizes, facts.training.sequence, facts.training)
        most = activations(facts.actor, sizes, facts.training.tokens, facts.training)
        stays_awake = {name: size for name, size in engine.items() if not hands_over or _stays(name, facts.engine)}
        at_work = {**fixed, **trainer, **stays_awake, "activations": certain}
        found.append(peak(TRAINS, at_work, max(0, most - certain)))
    return found


def _stays(name: str, engine: EngineMemory) -> bool:
    return engine.weights_stay and name != "KV cache"


def on_device(state: dict[str, int], settings: TrainingMemory) -> dict[str, int]:
    """Of a rank's state, what is on its device while it computes."""
    held = {"reference": float(not settings.references_offload), "optimizer": 1 - settings.optimizer_on_host}
    return {name: int(size * held.get(name, 1.0)) for name, size in state.items()}


def offloaded(state: Mapping[str, int], settings: TrainingMemory) -> dict[str, int]:
    """Of a rank's state, what has a copy in the host's memory; gradients are dropped (verl/utils/megatron_utils.py)."""
    shares = {
        "offloaded weights": ("weights", float(settings.param_offload)),
        "offloaded reference": ("reference", float(settings.references_offload)),
        "offloaded optimizer": ("optimizer", (1 - settings.optimizer_on_host) * settings.optimizer_offload),
        "optimizer on the host": ("optimizer", settings.optimizer_on_host),
    }
    return {name: size for name, (part, share) in shares.items() if (size := int(state[part] * share))}


def _resident(trainer: dict[str, int], facts: MemoryFacts) -> dict[str, int]:
    """The trainer's state that stays while it does not train; on a host, offloading frees nothing."""
    away = {"param": facts.training.param_offload, "optimizer": facts.training.optimizer_offload}
    if facts.shared:
        return trainer
    return {name: size for name, size in trainer.items() if not away.get(RESIDENT.get(name, ""), False)}


PROCESS = 2**30  # resident after its imports: 0.5 to 0.8 GB without CUDA's libraries
STAGED, ENGINE_COPIES, PROCESSES = "staged weights", "engine copies", "processes"


@dataclass(frozen=True)
class HostPeak:
    """The needs of machine `node`, of group `group`, in bytes by part."""

    node: int
    group: str
    parts: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.parts)


def staged_bytes(model: ModelFacts) -> int:
    """Bytes of one staged version of the weights: the whole model, shared weights once."""
    return WEIGHT * model.parameters


def host_peaks(
    facts: MemoryFacts,
    devices: Sequence[PlannedDevice],
    ranks: Sequence[int],
    sizes: ParallelSizes,
    replica: ReplicaSizes,
) -> tuple[HostPeak, ...]:
    """What each machine needs; `ranks` are the trainer's device numbers in their order."""
    first_node = next((device.node for device in devices if ranks and device.number == ranks[0]), None)
    hybrid = any(TRAIN in device.tags and ROLLOUT in device.tags for device in devices)
    state = offloaded(trainer_state(facts.actor, sizes, len(ranks), facts.training), facts.training)
    copies = engine_weights(facts.actor, replica, facts.engine) if facts.engine.kept_on_host else 0
    found = []
    for node in dict.fromkeys(device.node for device in devices):
        here = [device for device in devices if device.node == node]
        training = sum(TRAIN in device.tags for device in here)
        generating = sum(ROLLOUT in device.tags for device in here)
        loads = generating or (training and (hybrid or node == first_node))
        parts = {STAGED: staged_bytes(facts.actor) * bool(facts.staged and loads)}
        if not facts.shared:  # there, nothing is offloaded, and the devices' own estimates have the processes
            parts |= {name: size * training for name, size in state.items()}
            parts[ENGINE_COPIES] = copies * sum(TRAIN in d.tags and ROLLOUT in d.tags for d in here)
            parts[PROCESSES] = PROCESS * (training + generating)
        kept = tuple((name, size) for name, size in parts.items() if size)
        found.append(HostPeak(node, here[0].group, kept))
    return tuple(found)
