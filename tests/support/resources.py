"""Machine groups and model facts, for the tests of the resources room."""

from __future__ import annotations

from typing import Any

from seamless_verl.resources.memory import EngineMemory, MemoryFacts, TrainingMemory
from seamless_verl.resources.model_facts import ModelFacts
from seamless_verl.resources.parallel import ParallelSizes, ReplicaSizes
from seamless_verl.resources.placement import Roles
from seamless_verl.resources.plan import Plan, make_plan
from seamless_verl.resources.tags import Resources

# Qwen/Qwen3-8B's config.json, as far as its size goes.
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


def group(count: int, devices: int, *tags: str, name: str | None = None, **labels: str) -> dict[str, Any]:
    return {"name": name, "count": count, "devices": devices, "tags": list(tags), "labels": labels or None}


def resources(*groups: dict[str, Any]) -> Resources:
    parsed = Resources.parse(list(groups))
    assert parsed is not None
    return parsed


def plan(
    *groups: dict[str, Any],
    sizes: ParallelSizes | None = None,
    replica: int = 1,
    roles: Roles | None = None,
    memory: MemoryFacts | None = None,
) -> Plan:
    parallel, needed = sizes or ParallelSizes(), roles or Roles()
    return make_plan(resources(*groups), parallel, ReplicaSizes(replica), needed, memory)


def qwen3_8b() -> ModelFacts:
    facts = ModelFacts.read(QWEN3_8B)
    assert facts is not None
    return facts


def memory_facts(device_gb: float | None, *, tokens: int = 4096, **changes: Any) -> MemoryFacts:
    """Qwen3-8B with verl's default buckets."""
    training = TrainingMemory(tokens=tokens, sequence=min(tokens, 4096))
    size = None if device_gb is None else int(device_gb * 10**9)
    facts = {"training": training, "engine": EngineMemory(longest=4096), "bucket_bytes": 2**31}
    return MemoryFacts(actor=qwen3_8b(), device_bytes=size, **{**facts, **changes})
