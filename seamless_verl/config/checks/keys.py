"""The check of keys that verl does not have: given in a config file, or added with `+`, hydra takes any of them.

A key that verl does not read is silently ignored, and its default holds. It is refused where it is almost a known one.
Nodes that are passed on as they are (`engine_kwargs`, `override_config`) may have any key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from seamless_verl.config.checks.hosts import has_own_code
from seamless_verl.config.composing import HERE
from seamless_verl.config.roles import has_reward_model, has_teacher, needs_critic, needs_reference
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.config.verl_keys import DEFAULT_ENGINE, ENGINE, engine_config, engines, items_of, read_yaml

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
    found = list[Problem]()
    for path, name, value in _unknown({node: settings.get(node) for node in NODES}, ""):
        key, near = f"{path}.{name}", get_close_matches(name, sorted(_names()[path]), n=1, cutoff=ALMOST)
        if near:
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
