"""Checks of lengths against what is there: the first prompts of the data, and the KV cache of an engine.

Prompts are rendered with the model's own chat template and its tokenizer.json, with their tools, as verl and vLLM do
it. Neither torch nor transformers' tokenizers are imported for that. A model without these files is not checked.

Sources: verl/utils/dataset/rl_dataset.py `maybe_filter_out_long_prompts`, verl/tools/tool_registry.py,
vllm/v1/core/kv_cache_utils.py `check_enough_kv_cache_memory`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from seamless_verl.config import engine_kwargs
from seamless_verl.config.checks.files import FILE_KEYS
from seamless_verl.config.model import MODEL, locate, model_config, text_config
from seamless_verl.config.paths import looking_at
from seamless_verl.config.roles import ROLLOUT_KEY
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.errors import ConfigError
from seamless_verl.resources.memory import cache_bytes_per_token, engine_weights
from seamless_verl.resources.memory_fit import gigabytes
from seamless_verl.resources.model_facts import ModelFacts

SCANNED = 64  # prompts of a file, from its beginning
LIMIT, RESPONSE = "data.max_prompt_length", "data.max_response_length"
LONGEST = f"{ROLLOUT_KEY}.max_model_len"
TOOLS = ("data.tool_config_path", f"{ROLLOUT_KEY}.multi_turn.tool_config_path")
Length = Callable[[list[Any], list[Any] | None], int]


@check
def check_prompts(settings: Settings) -> list[Problem]:
    """The first prompts of each file fit; refused where none does, since then nothing could be trained as meant."""
    if settings.get("data.custom_cls.path") is not None or settings.get("data.image_key") in _columns(settings):
        return []
    length = prompt_length(settings)
    return [] if length is None else [p for key in FILE_KEYS for p in _check_files(settings, key, length)]


def _check_files(settings: Settings, key: str, length: Length) -> list[Problem]:
    limit, common = settings.integer(LIMIT), _common_tools(settings)
    found: list[Problem] = []
    for path in parquet_files(settings, key):
        lengths, error = list[int](), ""
        for prompt, tools in _first_prompts(path, settings.text("data.prompt_key", "prompt")):
            try:
                lengths.append(length(prompt, tools or common))
            except Exception as problem:  # a chat template may raise anything
                error = error or f"{type(problem).__name__}: {problem}"
        if error:
            reason = f"has prompts that the model's chat template cannot render: {error}"
            found.append(Problem(key, path, reason, "Correct them, or the template", warning=True))
        found += _too_long(settings, key, path, lengths, limit)
    return [replace(problem, warning=True, unmade=True) for problem in found] if settings.unmade else found


def _too_long(settings: Settings, key: str, path: str, lengths: list[int], limit: int) -> list[Problem]:
    long = [length for length in lengths if length > limit]
    filtered = settings.flag("data.filter_overlong_prompts") and len(long) < len(lengths)
    if not long or filtered:
        return []
    what = f"{len(long)} of the first {len(lengths)} prompts of {key}={path} have more tokens with their tools"
    way_out = f"Set {LIMIT}={max(long)}, or data.filter_overlong_prompts=True to leave such prompts out"
    may_run = len(long) < len(lengths) or settings.seamless.gateway.enabled  # an agent may send something else
    return [Problem(LIMIT, limit, f"{what}, up to {max(long)}", way_out, warning=may_run)]


def prompt_length(settings: Settings) -> Length | None:
    """Counts the tokens of messages with tools, as the model reads them; None without tokenizer or template."""
    key = f"{MODEL}.tokenizer_path" if settings.get(f"{MODEL}.tokenizer_path") is not None else f"{MODEL}.path"
    folder = locate(key, settings.text(key))
    if folder is None or not os.path.isfile(folder / "tokenizer.json"):
        return None
    facts = _json(folder / "tokenizer_config.json")
    template_file = folder / "chat_template.jinja"
    with looking_at(key, str(folder), template_file.name):
        template = template_file.read_text("utf-8") if template_file.is_file() else facts.get("chat_template")
    template = settings.get(f"{MODEL}.custom_chat_template") or template
    if not isinstance(template, str):
        return None
    from tokenizers import Tokenizer
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # of no narrower type
        reason = f"its tokenizer.json cannot be read: {error}"
        raise ConfigError(
            key, str(folder), reason, "Download it again, in a git repository by `git lfs pull`"
        ) from error
    special = {name: _token(facts[name]) for name in facts if name.endswith("_token")}
    own = {**special, **settings.get("data.apply_chat_template_kwargs", {})}

    def length(messages: list[Any], tools: list[Any] | None) -> int:
        arguments = {"chat_template": template, "add_generation_prompt": True, **own}
        texts = render_jinja_template([messages], tools=tools, **arguments)[0]
        return len(tokenizer.encode(texts[0], add_special_tokens=False).ids)

    return length


def _token(value: Any) -> Any:
    """A special token's text, which may be written with its properties."""
    return value.get("content") if isinstance(value, Mapping) else value


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def parquet_files(settings: Settings, key: str) -> list[str]:
    """Those data files that are parquet on this machine."""
    value = settings.get(key)
    paths = value if isinstance(value, list) else [value]
    local = [os.path.expanduser(path) for path in paths if isinstance(path, str) and path.endswith(".parquet")]
    return [path for path in local if os.path.isfile(path)]  # others are reported by check_data


def _columns(settings: Settings) -> set[str]:
    from pyarrow import ArrowInvalid, parquet

    names = set[str]()
    for key in FILE_KEYS:
        for path in parquet_files(settings, key):
            try:
                names |= set(parquet.read_schema(path).names)
            except (ArrowInvalid, OSError):
                continue  # reported by check_data
    return names


def _first_prompts(path: str, key: str) -> Iterator[tuple[list[Any], list[Any] | None]]:
    """Messages and own tools of the first rows; nothing for a file that check_data refuses."""
    from pyarrow import ArrowInvalid, parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = [name for name in (key, "tools") if name in file.schema_arrow.names]
            batch = next(file.iter_batches(SCANNED, columns=names), None) if key in names else None
    except (ArrowInvalid, OSError):
        return
    for row in [] if batch is None else batch.to_pylist():
        if isinstance(row[key], list):
            tools = row.get("tools")
            tools = json.loads(tools) if isinstance(tools, str) and tools else tools
            yield without_none(row[key]), without_none(tools) or None


def without_none(value: Any) -> Any:
    """Without the fields that parquet fills in because other rows have them."""
    if isinstance(value, Mapping):
        return {name: without_none(inner) for name, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, list) else value


def _common_tools(settings: Settings) -> list[Any] | None:
    """The schemas in the file of tools of verl's agent loops."""
    path = next((settings.text(key) for key in TOOLS if settings.get(key)), None)
    if path is None or not os.path.isfile(path):
        return None
    try:
        with looking_at(TOOLS[1], path):
            entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["tools"]
        return [entry["tool_schema"] for entry in entries if entry.get("tool_schema")] or None
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(TOOLS[1], path, f"is no file of tools: {error!r}", "Write verl's `tools:` list") from error


@check
def check_cache(settings: Settings) -> list[Problem]:
    """The KV cache holds the longest sequence, or vLLM refuses to start; as far as both sizes are certain."""
    from seamless_verl.config.planning import device_memory, engine_memory, replica_sizes

    config = model_config(settings, MODEL)
    facts = None if config is None else ModelFacts.read(config)
    options = settings.get(engine_kwargs.KEY)
    if config is None or facts is None or not facts.exact or settings.get(f"{ROLLOUT_KEY}.name") != "vllm":
        return []
    if text_config(config).get("sliding_window") or engine_kwargs.given(options, "kv_cache_dtype") not in (
        None,
        "auto",
    ):
        return []  # takes less
    engine, sizes = engine_memory(settings), replica_sizes(settings)
    length = settings.integer(LONGEST, 0, least=0) or settings.integer(LIMIT) + settings.integer(RESPONSE)
    needed = length * cache_bytes_per_token(facts, sizes, engine)
    device, shared = device_memory(settings)
    if engine.cache_bytes is not None:
        room, where = engine.cache_bytes, f"{engine_kwargs.KEY}.kv_cache_memory_bytes={engine.cache_bytes}"
        raised = f"{engine_kwargs.KEY}.kv_cache_memory_bytes={needed}"
    elif device is not None and not shared:
        room = int(engine.utilization * device) - engine_weights(facts, sizes, engine)
        where = f"{ROLLOUT_KEY}.gpu_memory_utilization={engine.utilization:g} leaves {gigabytes(max(room, 0))} for it"
        raised = f"a larger {ROLLOUT_KEY}.gpu_memory_utilization or tensor_model_parallel_size"
    else:
        return []
    if needed <= room:
        return []
    key = LONGEST if settings.get(LONGEST) is not None else LIMIT
    value = length if key == LONGEST else settings.integer(LIMIT)
    fits = max(room, 0) * length // needed
    reason = f"a sequence of {length} tokens takes {needed} bytes of KV cache, and {where}"
    return [Problem(key, value, reason, f"Lower it, so that a sequence has {fits} tokens, or set {raised}")]
