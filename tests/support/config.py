"""A tiny run's config and the files it names, for the tests of the config package."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from pyarrow import parquet

from seamless_verl.config import preflight, register_search_path
from seamless_verl.config.composing import HERE, verl_config_dir
from seamless_verl.config.settings import Config, Problem
from seamless_verl.errors import ConfigErrors

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 32,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
ROW = {
    "data_source": "arithmetic",
    "prompt": [{"role": "user", "content": "1+1="}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


def compose_ours(*overrides: str) -> DictConfig:
    register_search_path()
    with initialize_config_dir(str(HERE), version_base=None):
        return compose("seamless_ppo_trainer", list(overrides))


def compose_verl(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(verl_config_dir()), version_base=None):
        return compose("ppo_trainer", list(overrides))


def write_model(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    return folder


def write_rows(file: Path, row: Mapping[str, Any] = ROW, rows: int = 64) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist([dict(row)] * rows), file)
    return file


TINY = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.megatron.vanilla_mbridge=True",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "trainer.n_gpus_per_node=1",
)
# What of it a command line needs.
TINY_CLI = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.n=4",
)
# Large parts of verl's config that no check reads; without them a test takes a fraction of the time.
UNREAD = (
    *("global_profiler", "profiler", "skip", "transfer_queue", "distillation_loss"),
    *("optim", "checkpoint", "policy_loss", "qat", "mtp", "lora", "tiled_mlp"),
    *("agent", "multi_turn", "prometheus", "trace", "val_kwargs", "engine_kwargs"),
)


def tiny_files(folder: Path) -> list[str]:
    """A model and data in `folder`, as overrides."""
    model = write_model(folder / "model")
    train, val = write_rows(folder / "train.parquet"), write_rows(folder / "val.parquet", rows=8)
    return [f"actor_rollout_ref.model.path={model}", f"data.train_files={train}", f"data.val_files={val}"]


def tiny_run(folder: Path, *overrides: str) -> DictConfig:
    """A run on one CPU device that nothing is wrong with, then the overrides."""
    config: DictConfig = pickle.loads(_tiny_tree())
    for text in (*tiny_files(folder), *overrides):
        key, _, value = text.lstrip("+").partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
    return config


def tiny_plain(folder: Path, *overrides: str) -> dict[str, Any]:
    """The same as plain values, in a tenth of the time; what follows another key by interpolation stays."""
    tree = copy.deepcopy(_tiny_values())
    for text in (*tiny_files(folder), *overrides):
        key, _, value = text.lstrip("+").partition("=")
        *nodes, name = key.split(".")
        inner = tree
        for node in nodes:
            inner = inner.setdefault(node, {})
        inner[name] = yaml.safe_load(value)
    return tree


@cache
def _tiny_values() -> dict[str, Any]:
    return plain(pickle.loads(_tiny_tree()))


@cache
def _tiny_tree() -> bytes:
    """Pickled: a config is read back in a seventh of the time in which it is copied."""
    tree = _pruned(OmegaConf.to_container(compose_ours(*TINY)))
    return pickle.dumps(OmegaConf.create(tree))


def _pruned(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    return {key: _pruned(value) for key, value in node.items() if key not in UNREAD}


def plain(config: DictConfig) -> dict[str, Any]:
    tree = OmegaConf.to_container(config, resolve=True)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def refused(config: Config, *, devices: int | None = 1, accelerator: bool = False) -> tuple[Problem, ...]:
    """The problems for which preflight refuses the config."""
    with pytest.raises(ConfigErrors) as caught:
        preflight(config, devices=devices, accelerator=accelerator)
    return tuple(one for one in caught.value.mistakes if isinstance(one, Problem))


def assert_refused(
    config: Config,
    key: str,
    value: object,
    way_out: str,
    *,
    devices: int | None = 1,
    accelerator: bool = False,
) -> None:
    """Refused for exactly one problem, whose message names the key, the value and the way out."""
    problems = refused(config, devices=devices, accelerator=accelerator)
    assert len(problems) == 1, [str(problem) for problem in problems]
    (problem,) = problems
    text = str(problem)
    assert problem.key == key
    assert f"{key}={value!r}: " in text
    assert way_out in problem.way_out and text.endswith(problem.way_out)
