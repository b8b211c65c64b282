"""The model: that it is there, that Megatron can take it, and that both engines can divide it.

Sources: mbridge/core/auto_bridge.py, verl/workers/config/model.py, verl/workers/engine/megatron,
megatron/core/transformer/transformer_config.py `__post_init__`, vllm/v1/attention/backends/cpu_attn.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from seamless_verl.config.checks.model_files import head_dim, locate, model_config, text_config
from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.roles import needs_critic, uses_megatron
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.checks.sizes import MEGATRON, ROLLOUT, MegatronSizes
from seamless_verl.config.checks.tables import MBRIDGE_MODEL_TYPES, VLLM_CPU_HEAD_SIZES
from seamless_verl.errors import ConfigError

MODEL = "actor_rollout_ref.model"
PATH = f"{MODEL}.path"


@check
def check_model(settings: Settings) -> list[Problem]:
    """The actor's model, its tokenizer and its one architecture."""
    locate(PATH, settings.text(PATH))
    if settings.get(f"{MODEL}.tokenizer_path") is not None:
        locate(f"{MODEL}.tokenizer_path", settings.text(f"{MODEL}.tokenizer_path"))
    config = model_config(settings, MODEL)
    if config is None:
        return []
    return [*_one_architecture(settings, config), *_megatron_takes(settings, config)]


@check
def check_critic_model(settings: Settings) -> list[Problem]:
    """The critic's model, when there is a critic, which GAE (verl's default) asks for."""
    if not needs_critic(settings):
        return []
    try:
        locate("critic.model.path", settings.text("critic.model.path"))
    except ConfigError as error:
        way_out = f"{error.way_out}, or train without a critic: algorithm.adv_estimator=grpo"
        raise type(error)(error.key, error.value, error.reason, way_out) from error
    return []


@check
def check_bridge(settings: Settings) -> list[Problem]:
    """The weight bridge that is chosen is installed."""
    key = f"{MEGATRON}.vanilla_mbridge"
    if not uses_megatron(settings) or settings.flag(key):
        return []
    try:
        version("megatron-bridge")
    except PackageNotFoundError:
        return [Problem(key, False, "Megatron-Bridge is not installed", f"Set {key}=True to use mbridge")]
    return []


@check
def check_head_size(settings: Settings) -> list[Problem]:
    """vLLM's CPU attention has kernels for some head sizes only."""
    if settings.host.accelerator or settings.text(f"{ROLLOUT}.name") != "vllm":
        return []
    config = model_config(settings, MODEL)
    size = None if config is None else head_dim(config)
    if size is None or size in VLLM_CPU_HEAD_SIZES:
        return []
    sizes = ", ".join(map(str, VLLM_CPU_HEAD_SIZES))
    reason = f"its head size (head_dim) is {size}, for which vLLM has no CPU attention"
    return [Problem(PATH, settings.get(PATH), reason, f"Use a model with a head size among {sizes}")]


@check
def check_model_division(settings: Settings) -> list[Problem]:
    """Heads and layers divide among the ranks that share them."""
    config = model_config(settings, MODEL)
    if config is None:
        return []
    text = text_config(config)
    heads = text.get("num_attention_heads")
    counts = [(f"{ROLLOUT}.tensor_model_parallel_size", heads, "attention heads")]
    if uses_megatron(settings):
        counts += _megatron_divisions(settings, text)
    problems = [_uneven(settings, *count) for count in counts]
    return [problem for problem in problems if problem is not None] + _query_groups(settings, text)


def _uneven(settings: Settings, key: str, count: Any, what: str) -> Problem | None:
    size = settings.integer(key, 1)
    if not isinstance(count, int) or count % size == 0:
        return None
    reason = f"does not divide the model's {count} {what}"
    return Problem(key, size, reason, f"Set {key} to a divisor of {count}")


def _one_architecture(settings: Settings, config: Mapping[str, Any]) -> list[Problem]:
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1:
        return []
    reason = f"config.json must name one architecture and names {names}"
    return [Problem(PATH, settings.get(PATH), reason, "Mend `architectures` in its config.json")]


def _megatron_takes(settings: Settings, config: Mapping[str, Any]) -> list[Problem]:
    kind = config.get("model_type")
    mbridge = uses_megatron(settings) and settings.flag(f"{MEGATRON}.vanilla_mbridge")
    if not mbridge or kind in MBRIDGE_MODEL_TYPES:
        return []
    architecture = ", ".join(config.get("architectures") or ["unknown"])
    reason = f"Megatron cannot take it: mbridge has no bridge for model_type {kind!r} ({architecture})"
    return [Problem(PATH, settings.get(PATH), reason, f"Use one of: {', '.join(MBRIDGE_MODEL_TYPES)}")]


def _megatron_divisions(settings: Settings, text: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    counts = [
        (f"{MEGATRON}.tensor_model_parallel_size", text.get("num_attention_heads"), "attention heads"),
        (f"{MEGATRON}.expert_model_parallel_size", _experts(text), "experts"),
    ]
    # A user who places layers by hand may well have uneven stages.
    by_hand = any("pipeline" in name for name in settings.get(f"{MEGATRON}.override_transformer_config", {}))
    if not by_hand:
        key = f"{MEGATRON}.pipeline_model_parallel_size"
        counts.append((key, text.get("num_hidden_layers"), "layers"))
    return counts


def _experts(text: Mapping[str, Any]) -> Any:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((text[name] for name in names if text.get(name)), None)


def _query_groups(settings: Settings, text: Mapping[str, Any]) -> list[Problem]:
    groups = text.get("num_key_value_heads")
    if not uses_megatron(settings) or not isinstance(groups, int):
        return []
    key, tensor = f"{MEGATRON}.tensor_model_parallel_size", MegatronSizes.read(settings).tensor
    if groups % tensor == 0 or tensor % groups == 0:
        return []
    reason = f"is neither a divisor nor a multiple of the model's {groups} key-value heads"
    return [Problem(key, tensor, reason, f"Set {key} to a divisor of {groups}")]
