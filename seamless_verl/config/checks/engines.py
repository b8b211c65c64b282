"""Checks of the training engine: one choice of it, and on the CPU platform Megatron without kernels of accelerators.

A verl script that was written for GPUs often asks for such kernels; the CPU platform's config leaves them out.

Sources: verl/workers/engine/*/transformer_impl.py `EngineRegistry.register`; of megatron/core:
models/common/embeddings/rope_utils.py, tensor_parallel/layers.py, fusions/fused_softmax.py, transformer/torch_norm.py,
transformer/transformer_config.py and transformer/moe/grouped_gemm_util.py.
"""

from __future__ import annotations

from seamless_verl.config.roles import needs_critic, needs_reference, uses_megatron
from seamless_verl.config.settings import Problem, Settings, check

KERNELS = {
    "apply_rope_fusion": "Transformer Engine",
    "gradient_accumulation_fusion": "a CUDA extension",
    "masked_softmax_fusion": "a CUDA extension",
    "moe_grouped_gemm": "a CUDA extension",
    "moe_permute_fusion": "Transformer Engine",
    "persist_layer_norm": "a CUDA extension",
}
"""Options of Megatron's config, with what each needs."""
ACTOR = "actor_rollout_ref.actor"
STRATEGY = f"{ACTOR}.strategy"
FSDP, MEGATRON = "verl.workers.config.FSDPActorConfig", "verl.workers.config.McoreActorConfig"


@check
def check_engine(settings: Settings) -> list[Problem]:
    """The strategy is one of the engine whose settings the actor has."""
    strategy, kind = settings.text(STRATEGY), settings.get(f"{ACTOR}._target_")
    if kind == MEGATRON and strategy.startswith("fsdp") and settings.host.accelerator:
        return [Problem(STRATEGY, strategy, "has its settings under another engine", "Add model_engine=dp")]
    if kind == FSDP and strategy == "megatron":
        return [Problem(STRATEGY, strategy, "has its settings under another engine", "Set model_engine=megatron")]
    return []


@check
def check_cpu_engine(settings: Settings) -> list[Problem]:
    """The CPU platform trains with Megatron."""
    strategy = settings.text(STRATEGY)
    if settings.host.accelerator or uses_megatron(settings):
        return []
    way_out = "Leave it out, with model_engine=megatron"
    return [Problem(STRATEGY, strategy, "does not run on the CPU platform", way_out)]


@check
def check_cpu_kernels(settings: Settings) -> list[Problem]:
    """Megatron is asked for no kernel that runs on accelerators only."""
    if settings.host.accelerator or not uses_megatron(settings):
        return []
    nodes = [ACTOR]
    nodes += ["actor_rollout_ref.ref"] if needs_reference(settings) else []
    nodes += ["critic"] if needs_critic(settings) else []
    keys = [(f"{node}.megatron.override_transformer_config.{name}", name) for node in nodes for name in KERNELS]
    return [
        Problem(key, True, f"needs {KERNELS[name]}, which the CPU platform lacks", "Leave it out on the CPU platform")
        for key, name in keys
        if settings.get(key)
    ]
