"""Checks of verl's keys and their values: missing ones, keys that verl does not have, values that nothing else reads.

Missing values (`???` in the yaml) count unless the part of the config that they belong to is switched off. A key that
verl does not read, given in a config file or added with `+`, is silently ignored, and its default holds. It is refused
where it is almost a known one. Nodes that are passed on as they are (`engine_kwargs`, `override_config`) may have any
key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from seamless_verl.config.checks.hosts import has_own_code
from seamless_verl.config.checks.modes import ROLLOUT
from seamless_verl.config.composing import HERE
from seamless_verl.config.roles import (
    ENGINE_KWARGS,
    OWN_DRAFTS,
    SPECULATIVE,
    engine_option,
    has_reward_model,
    has_teacher,
    needs_critic,
    needs_reference,
)
from seamless_verl.config.settings import MISSING, Problem, Settings, check
from seamless_verl.config.verl_keys import (
    DEFAULT_ENGINE,
    ENGINE,
    MOVED,
    VERL_MODES,
    engine_config,
    engines,
    items_of,
    read_yaml,
)

SUGGESTED = {"actor_rollout_ref.rollout.name": "vllm", "reward.reward_model.rollout.name": "vllm"}


@check
def check_missing(settings: Settings) -> list[Problem]:
    """One problem for each missing value that the run will read."""
    unused = tuple(_unused(settings))
    keys = [key for key in _missing(settings.tree, "") if not key.startswith(unused)]
    return [Problem(key, MISSING, "has no value", _way_out(key)) for key in keys]


def _way_out(key: str) -> str:
    return f"Add {key}={SUGGESTED.get(key, '...')} to the command"


def _unused(settings: Settings) -> Iterator[str]:
    if not has_reward_model(settings):
        yield "reward.reward_model."
    if not has_teacher(settings):
        yield "distillation."
    if not needs_critic(settings):
        yield "critic."


def _missing(node: object, prefix: str) -> Iterator[str]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _missing(value, f"{prefix}.{name}" if prefix else str(name))
    elif node == MISSING:
        yield prefix


PASSED_ON = re.compile(r"override_\w+|\w*kwargs|kw_args|\w+_options|turbo_config")
NODES = ("actor_rollout_ref", "algorithm", "critic", "data", "reward", "trainer")
ALMOST = 0.85  # how much of a name is that of a known one
OF_YOURS = "If code of yours reads it, give it another name"


@check
def check_keys(settings: Settings) -> list[Problem]:
    """No node of verl's has a key that is almost one of its own; a warning in a node that is not used."""
    if settings.get(ENGINE, DEFAULT_ENGINE) not in engines():
        return []
    off = [("critic.", needs_critic(settings)), ("actor_rollout_ref.ref.", needs_reference(settings))]
    off += [("reward.reward_model.", has_reward_model(settings)), ("distillation.", has_teacher(settings))]
    off += [("data.", settings.get("data.custom_cls.path") is None)]
    unused = tuple(node for node, used in off if not used)
    moved = {key: value for key in MOVED if (value := settings.get(key)) is not None}
    found = [Problem(key, value, "is not a key of verl 0.9.1", MOVED[key]) for key, value in moved.items()]
    for path, name, value in _unknown({node: settings.get(node) for node in NODES}, ""):
        key, near = f"{path}.{name}", get_close_matches(name, sorted(_names()[path]), n=1, cutoff=ALMOST)
        if near and key not in moved:
            way_out = f"Did you mean {path}.{near[0]}? {OF_YOURS}"
            may_be_read = key.startswith(unused) or has_own_code(settings) or isinstance(value, Mapping)
            found.append(Problem(key, value, "is not a known key", way_out, warning=may_be_read))
    return found


def _unknown(node: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """The keys below a node that no engine's config of verl has there, with the node's key, and their values."""
    for name, value in node.items() if isinstance(node, Mapping) else ():
        whole = f"{path}.{name}".lstrip(".")
        if path in _names() and isinstance(name, str) and name not in _names()[path] and not name.startswith("_"):
            yield path, name, value
        elif PASSED_ON.fullmatch(str(name)) is None:
            yield from _unknown(value, whole)


@cache
def _names() -> Mapping[str, frozenset[str]]:
    """The names in each node of verl's config, with any engine, and of this package's files, by the node's key."""
    files = [HERE / "seamless_ppo_trainer.yaml", *sorted((HERE / "platform").glob("*.yaml"))]
    found: dict[str, set[str]] = {}
    for tree in (*map(engine_config, engines()), *map(read_yaml, files)):
        for key, _ in items_of(tree):
            path, _, name = key.rpartition(".")
            found.setdefault(path, set()).add(name)
    return {path: frozenset(names) for path, names in found.items()}


@check
def check_temperature(settings: Settings) -> list[Problem]:
    """Training divides logits by the temperature, and verl samples validations with one above 0, where it samples."""
    keys = [f"{ROLLOUT}.temperature"]
    if settings.get(f"{ROLLOUT}.val_kwargs.do_sample") is True:
        keys.append(f"{ROLLOUT}.val_kwargs.temperature")
    given = [(key, settings.get(key)) for key in keys]
    return [
        Problem(key, value, "must be above 0", f"Set {key}=1.0")
        for key, value in given
        if isinstance(value, int | float) and not value > 0
    ]


@check
def check_top_p(settings: Settings) -> list[Problem]:
    """vLLM refuses each call with another share, when all engines have started; of validation, at the first one."""
    keys = (f"{ROLLOUT}.top_p", f"{ROLLOUT}.val_kwargs.top_p")
    given = [(key, settings.get(key)) for key in keys]
    return [
        Problem(key, value, "must be above 0 and at most 1", f"Set {key}=1.0")
        for key, value in given
        if isinstance(value, int | float) and not 0 < value <= 1
    ]


@check
def check_learning_rates(settings: Settings) -> list[Problem]:
    """torch's optimizer compares with 0 when the model has been loaded, and names neither key nor value."""
    keys = ("actor_rollout_ref.actor.optim.lr", *(["critic.optim.lr"] if needs_critic(settings) else []))
    given = [(key, settings.get(key)) for key in keys]
    return [Problem(key, lr, "is no rate", f"Set {key}=1e-6") for key, lr in given if not _is_rate(lr)]


def _is_rate(value: Any) -> bool:
    """Whether it is a number of at least 0, or none at all."""
    try:
        return value is None or float(value) >= 0
    except (TypeError, ValueError):
        return False


KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Of verl's `kl_penalty` in trainer/ppo/core_algos.py; each also with a `+` behind it, for the gradient of k2."""


@check
def check_kl_estimators(settings: Settings) -> list[Problem]:
    """verl raises a bare NotImplementedError for another name, in the first update or at the first rewards."""
    read_by = {
        "actor_rollout_ref.actor.kl_loss_type": "actor_rollout_ref.actor.use_kl_loss",
        "algorithm.kl_penalty": "algorithm.use_kl_in_reward",
    }
    given = [(key, settings.get(key)) for key, flag in read_by.items() if settings.flag(flag)]
    return [
        Problem(key, name, f"is none of {', '.join(KL_ESTIMATORS)}", f"Set {key}=low_var_kl")
        for key, name in given
        if str(name).removesuffix("+") not in KL_ESTIMATORS
    ]


@check
def check_drafts(settings: Settings) -> list[Problem]:
    """One of verl's fields and `seamless.drafts` asks for drafts, in a mode whose engines draft as asked."""
    drafts, mtp = settings.seamless.drafts, "actor_rollout_ref.model.mtp"
    if drafts == "off":
        return []
    if settings.mode != "seamless":
        way_out = "Set seamless.drafts=off, or trainer.v1.trainer_mode=seamless"
        return [Problem("seamless.drafts", drafts, "is for the replicas of seamless", way_out)]
    given = engine_option(settings.get(ENGINE_KWARGS), SPECULATIVE)
    other = f"{ENGINE_KWARGS}.{SPECULATIVE}" if given not in (None, OWN_DRAFTS) else None
    if settings.flag(f"{mtp}.enable") and settings.flag(f"{mtp}.enable_rollout"):
        other = f"{mtp}.enable_rollout"
    if other is not None:
        return [Problem("seamless.drafts", drafts, f"contradicts {other}, which drafts, too", "Leave one of them out")]
    routes = f"{ROLLOUT}.enable_rollout_routing_replay"
    if settings.flag(routes):
        return [
            Problem(
                "seamless.drafts", drafts, f"is not proved with {routes}", f"Set seamless.drafts=off, or {routes}=False"
            )
        ]
    return []


LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")
"""Of vLLM's modes those that give logprobs; replica/own_logprobs.py makes the model's own of both."""


@check
def check_logprobs_mode(settings: Settings) -> list[Problem]:
    """The engines record logprobs, which the trainer uses, and not logits."""
    overriding = engine_option(settings.get(ENGINE_KWARGS), "logprobs_mode")
    keys = {f"{ROLLOUT}.logprobs_mode": settings.get(f"{ROLLOUT}.logprobs_mode")}
    keys |= {} if overriding is None else {f"{ENGINE_KWARGS}.logprobs_mode": overriding}
    if settings.mode in VERL_MODES:
        return []
    return [
        Problem(key, value, "gives no logprobs to train with", f"Set {key}={' or '.join(LOGPROBS_MODES)}")
        for key, value in keys.items()
        if value is not None and value not in LOGPROBS_MODES
    ]
