"""What a model's config.json says: found and read without transformers, in a folder or in the hub's cache."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seamless_verl.config.paths import looking_at
from seamless_verl.config.settings import AbsentError, Settings
from seamless_verl.errors import ConfigError

MODEL = "actor_rollout_ref.model"
WITHOUT_TE = "seamless_verl.platform.engine_without_te"  # as config/platform/accelerator_without_te.yaml sets it
OUR_ENGINES = ("seamless_verl.platform.engine", WITHOUT_TE)  # Megatron's, with layers in plain torch
PATH = f"{MODEL}.path"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def model_config(settings: Settings, node: str) -> Mapping[str, Any] | None:
    """The model's config.json with verl's override_config applied.

    None when it cannot be read before the run: a hub id that is not in the cache, a remote path, or a model
    that may be made before the run. Raises ConfigError when the path cannot be a model.
    """
    key = f"{node}.hf_config_path" if settings.get(f"{node}.hf_config_path") else f"{node}.path"
    try:
        folder = locate(key, settings.text(key))
    except AbsentError:
        if not settings.unmade:
            raise
        return None
    if folder is None:
        return None
    overrides = settings.get(f"{node}.override_config", {})
    return {**_read(key, folder), **overrides.get("model_config", overrides)}


def locate(key: str, path: str) -> Path | None:
    """The local folder of a model path; None when it is remote.

    Raises:
        AbsentError: it does not exist. ConfigError: it is no folder.
    """
    if "://" in path:
        return None
    if os.path.isdir(path):
        return Path(path)
    expanded = os.path.expanduser(path)
    if expanded != path and os.path.isdir(expanded):
        raise ConfigError(key, path, "the ~ is not expanded by transformers", f"Set {key}={expanded}")
    if os.path.exists(path):
        raise ConfigError(key, path, "is a file", f"Set {key} to the folder that holds config.json")
    if not HUB_ID.fullmatch(path):
        raise AbsentError(key, path, "does not exist", f"Set {key} to a model folder or a hub id")
    return _cached(key, path)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config, which multimodal models nest."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _cached(key: str, hub_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    with looking_at(key, hub_id, "the hub's cache"):
        found = try_to_load_from_cache(hub_id, "config.json")
    if isinstance(found, str):
        return Path(found).parent
    owner, has_owner, _ = hub_id.partition("/")
    if has_owner and os.path.isdir(owner) and not list(Path(owner).glob("*/config.json")):  # Qwen/ may hold downloads
        way_out = f"Set {key} to a model folder; one of the hub is fetched by `hf download {hub_id}`"
        raise AbsentError(key, hub_id, f"is not in the local folder {owner}, nor in the hub's cache", way_out)
    offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    if offline.upper() in ("1", "ON", "YES", "TRUE"):
        reason = "is neither a folder nor in the hub's cache, and HF_HUB_OFFLINE is set"
        raise AbsentError(key, hub_id, reason, f"Set {key} to a model folder, or set HF_HUB_OFFLINE=0")
    return None


def _read(key: str, folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    with looking_at(key, str(folder), file.name):
        try:
            text = file.read_bytes()
        except FileNotFoundError:
            raise ConfigError(key, str(folder), "has no config.json", f"Set {key} to a model folder") from None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(key, str(folder), f"config.json is not JSON: {error}", "Correct the file") from error
    if not isinstance(config, dict):
        raise ConfigError(key, str(folder), "config.json is not an object", "Correct the file")
    return config
