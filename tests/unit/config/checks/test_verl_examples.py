"""verl's example scripts, by the overrides of each that matter: what verl 0.9.1 accepts passes, or is refused rightly.

`support/verl_examples.json` has for each script of verl's `examples/`, at commit 1dda039 of 2026-08-22, what
`support/verl_scripts.py` takes of it; whether verl 0.9.1 accepts that; and the keys that are refused for a run with
GPUs. The contract test of verl's examples compares it with a checkout.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from support.config import compose_ours, plain

from seamless_verl.config import preflight
from seamless_verl.config.adopting import adopt_base_weights
from seamless_verl.config.composing import for_hydra
from seamless_verl.config.verl_keys import MOVED
from seamless_verl.errors import ConfigError

TABLE = json.loads((Path(__file__).parents[3] / "support/verl_examples.json").read_text(encoding="utf-8"))
ACCEPTED = [name for name, row in TABLE.items() if row["verl"]]
RIGHTLY = {
    "algorithm.adv_estimator": "verl's V1 trainers",
    "actor_rollout_ref.rollout.name": "the seamless trainer streams from vLLM's engine",
    "reward.reward_model.enable_resource_pool": "on devices where engines hold their weights and cache",
    **{f"algorithm.rollout_correction.{name}": "is left out by" for name in ("rollout_is", "rollout_rs", "loss_type")},
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "does not divide the trainer's",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "",
    "actor_rollout_ref.actor.veomni.router_replay.mode": "replays routes with Megatron's engine alone",
    "actor_rollout_ref.model.lora_rank": "verl takes no adapter",
    **dict.fromkeys(MOVED, "is not a key of verl 0.9.1"),
}
"""The keys for which a script that verl accepts may be refused, with what the reason says."""


UNMADE = ("data.train_files=/data/train.parquet", "data.val_files=/data/val.parquet")
UNREAD = (
    "global_profiler",
    "transfer_queue",
    "actor_rollout_ref.rollout.multi_turn",
    "actor_rollout_ref.rollout.trace",
)
"""Nodes without which a config is resolved in a fraction of the time."""


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEAMLESS_PLATFORM", "accelerator")


@cache
def base(engine: str) -> bytes:
    given = ("actor_rollout_ref.model.path=org/model", "actor_rollout_ref.rollout.name=vllm", *UNMADE)
    config = compose_ours(f"model_engine={engine}", *given)
    for node in UNREAD:
        OmegaConf.update(config, node, {}, merge=False)
    return pickle.dumps(config)


def mistakes_of(overrides: list[str]) -> list[ConfigError]:
    """What is refused of a command line; hydra's refusal of a key is told by the config that lacks it."""
    words = [text.replace("A.", "actor_rollout_ref.", 1) for text in overrides]
    engine = next(text for text in words if text.startswith("model_engine=")).partition("=")[2]
    config: DictConfig = pickle.loads(base(engine))
    unknown = list[ConfigError]()
    for text in for_hydra([text for text in words if not text.startswith("model_engine=")]):
        key, _, value = text.lstrip("+").partition("=")
        given = yaml.safe_load(value)
        exists = OmegaConf.select(config, key, throw_on_missing=False) is not None or key in keys_of(engine)
        if text.startswith("+") or exists:
            OmegaConf.update(config, key, given, force_add=True)
        else:
            unknown.append(ConfigError(key, value, "is not a key of verl 0.9.1", ""))
    adopt_base_weights(config, words)
    try:
        preflight(plain(config), devices=None, accelerator=True, elsewhere=True)
    except ConfigError as error:
        unknown += error.mistakes
    return unknown


@cache
def keys_of(engine: str) -> frozenset[str]:
    from seamless_verl.config.verl_keys import engine_keys

    return engine_keys(engine)


@pytest.mark.parametrize("name", TABLE)
def test_a_script_passes_or_is_refused_rightly(name: str) -> None:
    row = TABLE[name]
    found = mistakes_of(row["overrides"])
    assert sorted({one.key for one in found}) == row["refused"], [str(one) for one in found]
    for one in found if row["verl"] else ():
        assert RIGHTLY[one.key] in one.reason, str(one)


def test_the_table_is_of_all_of_them() -> None:
    assert (len(TABLE), len(ACCEPTED)) == (92, 64)
    refused = Counter(key for name in ACCEPTED for key in TABLE[name]["refused"])
    assert refused.keys() <= RIGHTLY.keys()
