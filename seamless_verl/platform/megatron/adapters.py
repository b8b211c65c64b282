"""What verl 0.9.1 calls of Megatron-Bridge's adapters and 0.3.1, the newest for Python 3.11, does not have yet.

Each name is added only where it is missing: Megatron-Bridge has all of them from 0.5.0 on, with these signatures
(`megatron/bridge/peft/utils.py`, and `AutoBridge.save_hf_adapter`).
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from seamless_verl.errors import ConfigError

BRIDGE = "megatron.bridge"
CLASSES = {
    "lora": ("lora", "LoRA"),
    "vlm_lora": ("lora", "VLMLoRA"),
    "canonical_lora": ("canonical_lora", "CanonicalLoRA"),
    "dora": ("dora", "DoRA"),
}
ADAPTER_PATH = "actor_rollout_ref.model.lora.adapter_path"
PREFIX = "base_model.model."  # of each weight's name in PEFT's files


def complete_adapters() -> None:
    """Adds what is missing to Megatron-Bridge, which has been imported; may be called again."""
    peft, bridge = (importlib.import_module(f"{BRIDGE}{name}") for name in (".peft.utils", ""))
    for function in (create_peft, create_peft_hook, load_peft_adapter_checkpoint):
        if not hasattr(peft, function.__name__):
            setattr(peft, function.__name__, function)
    if not hasattr(bridge.AutoBridge, "save_hf_adapter"):
        bridge.AutoBridge.save_hf_adapter = save_hf_adapter


def create_peft(config: Mapping[str, Any], dtype: torch.dtype | None = None) -> Any:
    """Megatron-Bridge's adapters of verl's `model.lora`; None for rank 0."""
    settings = dict(config)
    settings["dim"] = settings.pop("rank", 0)
    if settings["dim"] <= 0:
        return None
    file, name = CLASSES[settings.pop("type", "lora")]
    made = getattr(importlib.import_module(f"{BRIDGE}.peft.{file}"), name)
    known = {field.name for field in fields(made) if field.init}
    return made(**{key: value for key, value in settings.items() if key in known} | {"lora_dtype": dtype})


def create_peft_hook(peft: Any, training: bool = True) -> Callable[[Any], Any]:
    """Gives the model its adapters, before Megatron wraps it."""

    def hook(model: Any) -> Any:
        transformed = peft(model, training=training)
        peft.set_params_to_save(transformed)
        return transformed

    return hook


def load_peft_adapter_checkpoint(model: Any, path: str, peft: Any, strict: bool = False) -> NoReturn:
    raise ConfigError(
        ADAPTER_PATH, str(path), "is loaded by Megatron-Bridge from 0.5.0 on", "Leave it out, or install that version"
    )


def save_hf_adapter(self: Any, model: Any, path: str | Path, peft: Any, **options: Any) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, which PEFT loads; all ranks call it, rank 0 writes."""
    from safetensors.torch import save_file

    exported = self.export_adapter_weights(model, cpu=True, show_progress=False)
    weights = {f"{PREFIX}{name}": weight.detach().clone().contiguous() for name, weight in exported}
    if torch.distributed.get_rank() == 0:
        os.makedirs(path, exist_ok=True)
        save_file(weights, str(Path(path, "adapter_model.safetensors")))
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(getattr(self.hf_pretrained, "model_name_or_path", "")),
            "r": peft.dim,
            "lora_alpha": peft.alpha,
            "lora_dropout": peft.dropout,
            "bias": "none",
            "target_modules": sorted({name.split(".")[-3] for name in weights}),
        }
        Path(path, "adapter_config.json").write_text(json.dumps(config, indent=2))
    torch.distributed.barrier()
