"""Estimates the memory that each machine needs beside its accelerators, before anything starts.

All sizes are one machine's, in bytes, by what needs them:
- staged weights: one copy of a version on each host that loads it (weights/staging.py), in the trainer's dtype. The
  next version is written over it. The trainer's hosts stage it where replicas share the trainer's devices; else only
  the host of rank 0 does. Replicas on devices of their own map the copy of their host; where there is none it is sent,
  and the host keeps one for all of them;
- offloaded: what the trainer's ranks put away (`param_offload`, `optimizer_offload`), each its own share, pinned;
- the optimizer, or a share of it, where Megatron keeps and updates it on the host (`optimizer_cpu_offload`);
- engine copies: weights that engines keep in the host's memory while they sleep (vLLM's sleep level 1);
- processes: one for each rank of the trainer and of an engine (PROCESS).

Not counted: Ray's object store, TransferQueue's rows, data sets, and what users' agents need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seamless_verl.resources.memory import WEIGHT, MemoryFacts, engine_weights, offloaded, trainer_state
from seamless_verl.resources.model_facts import ModelFacts
from seamless_verl.resources.parallel import ParallelSizes, ReplicaSizes
from seamless_verl.resources.placement import PlannedDevice
from seamless_verl.resources.tags import ROLLOUT, TRAIN

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
