"""Adapters (LoRA) under our trainer."""

from __future__ import annotations

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.roles import trains_adapter, uses_megatron
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.checks.sizes import MEGATRON

MODEL = "actor_rollout_ref.model"


@check
def check_adapter(settings: Settings) -> list[Problem]:
    """Our replicas generate with whole weights: beside them an adapter would be trained and not used."""
    if settings.mode != "seamless" or not trains_adapter(settings):
        return []
    found = _megatron_adapter(settings) if uses_megatron(settings) else []
    key = f"{MODEL}.lora.merge"
    if settings.flag(key):
        return found
    way_out = f"Set {key}=True, which sends merged weights, or use one of verl's own trainer modes"
    return [*found, Problem(key, False, "the seamless trainer's engines would generate without the adapter", way_out)]


def _megatron_adapter(settings: Settings) -> list[Problem]:
    """What Megatron's engine would train without an adapter, or not start (transformer_impl.py, `get_peft_cls`)."""
    rank, vanilla = f"{MODEL}.lora.rank", f"{MEGATRON}.vanilla_mbridge"
    if not settings.integer(rank, 0, least=0):
        wanted = settings.get(f"{MODEL}.lora_rank", 0) or 8
        return [Problem(rank, 0, "is the only rank that Megatron's engine reads", f"Set {rank}={wanted}")]
    if not settings.flag(vanilla):
        return []
    return [Problem(vanilla, True, "makes no adapters, which Megatron-Bridge does", f"Set {vanilla}=False")]
