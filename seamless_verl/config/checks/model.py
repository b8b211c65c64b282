"""Checks of the model: it exists, Megatron can load it, both engines can divide it, and an adapter can be used.

A model's config.json is found and read without transformers, in a folder or in the hub's cache.

Sources: mbridge/core/auto_bridge.py, verl/workers/config/model.py, verl/workers/engine/megatron,
megatron/core/transformer/transformer_config.py `__post_init__`, vllm/v1/attention/backends/cpu_attn.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from seamless_verl.config.checks.devices import check_rollout_parallel, check_trainer_parallel
from seamless_verl.config.model import MODEL, OUR_ENGINES, PATH, WITHOUT_TE, locate, model_config, text_config
from seamless_verl.config.roles import (
    MEGATRON,
    ROLLOUT_KEY,
    brings_code,
    joins_cluster,
    needs_critic,
    trains_adapter,
    uses_megatron,
)
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.errors import ConfigError


@check
def check_model(settings: Settings) -> list[Problem]:
    """The actor's model and tokenizer exist, and its config can be read."""
    locate(PATH, settings.text(PATH))
    if settings.get(f"{MODEL}.tokenizer_path") is not None:
        locate(f"{MODEL}.tokenizer_path", settings.text(f"{MODEL}.tokenizer_path"))
    model_config(settings, MODEL)
    return []


@check
def check_critic_model(settings: Settings) -> list[Problem]:
    """The critic's model exists, when there is a critic, as with GAE (verl's default)."""
    if not needs_critic(settings):
        return []
    try:
        locate("critic.model.path", settings.text("critic.model.path"))
    except ConfigError as error:
        way_out = f"{error.way_out}, or train without a critic: algorithm.adv_estimator=grpo"
        raise type(error)(error.key, error.value, error.reason, way_out) from error
    return []


@check
def check_layers(settings: Settings) -> list[Problem]:
    """On an accelerator Transformer Engine is installed, or Megatron's layers are chosen to be plain torch."""
    elsewhere = joins_cluster(settings) or brings_code(settings)  # what is installed there is not known here
    if not settings.host.accelerator or elsewhere or not uses_megatron(settings):
        return []
    if settings.get(f"{MODEL}.external_lib") == WITHOUT_TE or find_spec("transformer_engine") is not None:
        return []
    reason = "Megatron's layers need Transformer Engine there, which is not installed on this machine"
    return [Problem("platform", "accelerator", reason, "Install it, or set platform=accelerator_without_te")]


@check
def check_context_parallel(settings: Settings) -> list[Problem]:
    """Attention in plain torch sees a rank's own tokens alone."""
    key = f"{MEGATRON}.context_parallel_size"
    size = settings.integer(key, 1)
    if not uses_megatron(settings) or size == 1 or settings.get(f"{MODEL}.external_lib") not in OUR_ENGINES:
        return []
    return [Problem(key, size, "Megatron's layers in plain torch have no context parallelism", f"Set {key}=1")]


@check
def check_model_division(settings: Settings) -> list[Problem]:
    """Heads, layers and experts divide among the ranks that share them; nothing on a size that its devices refuse."""
    config = model_config(settings, MODEL)
    if config is None:
        return []
    text = text_config(config)
    heads = text.get("num_attention_heads")
    counts = [(f"{ROLLOUT_KEY}.tensor_model_parallel_size", heads, "attention heads")]
    if uses_megatron(settings):
        counts += _megatron_divisions(settings, text)
    refused = {problem.key for problem in (*check_rollout_parallel(settings), *check_trainer_parallel(settings))}
    problems = [_uneven(settings, *count) for count in counts]
    return [problem for problem in problems if problem is not None and problem.key not in refused]


def _uneven(settings: Settings, key: str, count: Any, what: str) -> Problem | None:
    size = settings.integer(key, 1)
    if not isinstance(count, int) or count % size == 0:
        return None
    reason = f"does not divide the model's {count} {what}"
    return Problem(key, size, reason, f"Set {key} to a divisor of {count}")


def _megatron_divisions(settings: Settings, text: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    counts = [
        (f"{MEGATRON}.tensor_model_parallel_size", text.get("num_attention_heads"), "attention heads"),
        (f"{MEGATRON}.expert_model_parallel_size", _experts(text), "experts"),
    ]
    # A user who places layers by hand may have uneven stages on purpose.
    by_hand = any("pipeline" in name for name in settings.get(f"{MEGATRON}.override_transformer_config", {}))
    if not by_hand:
        key = f"{MEGATRON}.pipeline_model_parallel_size"
        counts.append((key, text.get("num_hidden_layers"), "layers"))
    return counts


def _experts(text: Mapping[str, Any]) -> Any:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((text[name] for name in names if text.get(name)), None)


DUMMY = "dummy"  # verl's default: random weights, until the first commit
LOAD_FORMAT, MERGE = f"{ROLLOUT_KEY}.load_format", f"{MODEL}.lora.merge"


def lacks_base_weights(settings: Settings) -> bool:
    """Whether replicas would be sent an adapter alone, beside random weights."""
    if settings.mode != "seamless" or not trains_adapter(settings) or settings.flag(MERGE):
        return False
    return bool(settings.get(LOAD_FORMAT, DUMMY) == DUMMY)


@check
def check_adapter(settings: Settings) -> list[Problem]:
    """An adapter alone is sent to replicas, unless it is merged: they read the model's own weights from its files."""
    if settings.mode != "seamless" or not trains_adapter(settings):
        return []
    found = _megatron_adapter(settings) if uses_megatron(settings) else _adapter_of_a_path(settings)
    if not lacks_base_weights(settings):
        return found
    reason = "leaves replicas without the model's own weights: beside these the adapter alone is sent"
    way_out = f"Set {LOAD_FORMAT}=safetensors, or {MERGE}=True, which sends merged weights"
    return [*found, Problem(LOAD_FORMAT, DUMMY, reason, way_out)]


def _adapter_of_a_path(settings: Settings) -> list[Problem]:
    """verl's other engines and its servers go by the rank (fsdp/transformer_impl.py, `_is_lora`): at 0 the whole model
    would be trained, without the adapter, and the reference asked for a model without its adapter."""
    path, rank = f"{MODEL}.lora_adapter_path", f"{MODEL}.lora_rank"
    if settings.get(path) is None or settings.integer(rank, 0, least=0):
        return []
    return [Problem(rank, 0, f"leaves {path} unread: verl takes no adapter", f"Set {rank}=N, that of the adapter")]


def _megatron_adapter(settings: Settings) -> list[Problem]:
    """Settings with which Megatron's engine trains no adapter or fails (transformer_impl.py, `get_peft_cls`)."""
    rank, vanilla = f"{MODEL}.lora.rank", f"{MEGATRON}.vanilla_mbridge"
    if not settings.integer(rank, 0, least=0):
        wanted = settings.get(f"{MODEL}.lora_rank", 0) or 8
        return [Problem(rank, 0, "is the only rank that Megatron's engine reads", f"Set {rank}={wanted}")]
    if not settings.flag(vanilla):
        return []
    return [Problem(vanilla, True, "makes no adapters, which Megatron-Bridge does", f"Set {vanilla}=False")]
