"""Names that verl's config and ours share: keys, modes, methods, reserved columns, and the keys of each engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from seamless_verl.algorithms import ESTIMATORS, LOSSES
from seamless_verl.config.composing import verl_config_dir

MODE_KEY = "trainer.v1.trainer_mode"
VERL_MODES = ("sync", "colocate_async", "separate_async")
FOLDER = "trainer.default_local_dir"
ESTIMATOR = "algorithm.adv_estimator"
OWN_ESTIMATORS = tuple(ESTIMATORS)
"""They compare the sessions of a group, which our trainer tells apart."""
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
OWN_LOSSES = tuple(LOSSES)
"""Policy losses of this package; they need the versions of tokens, which our trainer gives."""
ENGINE = "model_engine"
DEFAULT_ENGINE = "dp"  # verl's own default, FSDP, whose file has no engine in its name
RESERVED_COLUMNS = frozenset(
    (
        # of each row that is trained
        *("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids", "loss_mask"),
        *("rollout_log_probs", "routed_experts", "rm_scores", "multi_modal_inputs", "num_turns", "metrics"),
        *("extra_fields", "mm_processor_kwargs", "mm_processor_output", "teacher_ids", "teacher_logprobs"),
        *("weight_version", "grammar"),
        # which the trainer adds
        *("old_log_probs", "ref_log_prob", "log_probs", "entropy", "values", "advantages", "returns"),
        *("token_level_scores", "token_level_rewards", "rollout_is_weights"),
        # arguments of agent loops, beside which they get the columns of a prompt
        *("self", "sampling_params", "session_id", "trajectory", "trace", "output", "validate"),
    )
)
"""Columns that the run computes, by the names that verl and this package give them. Data has none of these names: where
no footer says so, an agent loop worker leaves them out."""

MOVED = {
    **{
        f"{node}.megatron.grad_offload": f"Leave it out: verl 0.9.1 moves gradients with {node}.megatron.param_offload"
        for node in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    },
    **{
        f"actor_rollout_ref.actor.policy_loss.{name}": f"Set actor_rollout_ref.actor.{name} instead"
        for name in ("tau_pos", "tau_neg")
    },
}
"""Keys of earlier releases of verl, with what is to be done; added with `+` they fail where a worker reads its node."""


@cache
def engines() -> tuple[str, ...]:
    """The names of verl's training engines; the default one first."""
    names = sorted(file.stem for file in (verl_config_dir() / ENGINE).glob("*.yaml"))
    return tuple(sorted(names, key=lambda name: name != DEFAULT_ENGINE))


@cache
def engine_keys(engine: str) -> frozenset[str]:
    """Every key of verl's config with that engine."""
    return frozenset(key for key, _ in items_of(engine_config(engine)))


@cache
def engine_config(engine: str) -> Mapping[str, Any]:
    """verl's whole config with that engine, interpolations as they are written."""
    name = "" if engine == DEFAULT_ENGINE else f"_{engine}"
    return read_yaml(verl_config_dir() / f"_generated_ppo{name}_trainer.yaml")


def chosen_engine(engine: str, overrides: Sequence[str]) -> str | None:
    """In words the engine that our config has in place of verl's default; None where a command line names one.

    It names one by the choice, by a strategy, by one of its files, or by a key that verl's default lacks.
    """
    named = {text.lstrip("+~").partition("=")[0] for text in overrides}
    groups = {ENGINE, "actor", "ref", "critic"}
    if engine == DEFAULT_ENGINE or any(
        key.partition("@")[0] in groups or key.endswith(".strategy") or f".{engine}." in key for key in named
    ):
        return None
    if named & (engine_keys(engine) - engine_keys(DEFAULT_ENGINE)):
        return None
    return f"chosen: {ENGINE}={engine} (verl's default is {DEFAULT_ENGINE}; docs/migrating.md)"


def read_yaml(file: Path) -> Mapping[str, Any]:
    """A file's mapping; an empty one where it has another value."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    tree = yaml.load(file.read_text(encoding="utf-8"), loader)
    return tree if isinstance(tree, Mapping) else {}


def items_of(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key below a node, with its value; a node comes before its keys."""
    for name, value in node.items():
        key = f"{prefix}.{name}".lstrip(".")
        yield key, value
        if isinstance(value, Mapping):
            yield from items_of(value, key)
