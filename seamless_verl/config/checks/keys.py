"""A check of keys that verl does not have: given in a config file, or added with `+`, hydra takes any of them.

A node with a `_target_` becomes a dataclass of verl, which takes its fields and nothing else: verl would refuse
another key, minutes after the start. Other nodes stay mappings. A key that verl does not read there is silently
ignored, and verl's default holds. It is refused where it is almost a known one, else it is a warning: code of the
user's may read it. Nodes that are passed on as they are (`engine_kwargs`, `override_config`) may have any key.

Nothing of verl is imported: the keys are those of its own files, and of the source of its dataclasses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from seamless_verl.config.checks.hosts import has_own_code
from seamless_verl.config.checks.sources import fields_of
from seamless_verl.config.composing import HERE, verl_config_dir
from seamless_verl.config.roles import has_reward_model, has_teacher, needs_critic, needs_reference
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.config.verl_keys import (
    DEFAULT_ENGINE,
    ENGINE,
    engine_config,
    engine_keys,
    engines,
    items_of,
    read_yaml,
)
from seamless_verl.runtime.fields import nearest

TARGET = "_target_"
PASSED_ON = re.compile(r"override_\w+|\w*kwargs|kw_args|\w+_options|turbo_config")
CHECKED_ELSEWHERE = ("seamless", "hydra", "ray_kwargs")
NODES = ("actor_rollout_ref", "algorithm", "critic", "data", "reward", "trainer")
NEVER_MADE = ("algorithm", "reward", "global_profiler")  # verl reads these as they are, in spite of their `_target_`
ALMOST, ALIKE = 0.85, 0.6  # how much of a name is that of a known one, for a refusal and for a suggestion
LISTED = 3  # other nodes that have a key, at most
OF_YOURS = "If code of yours reads it, give it another name"


@check
def check_keys(settings: Settings) -> list[Problem]:
    """No node of verl's has a key that verl does not have, as far as its files and sources show it."""
    engine = settings.get(ENGINE, DEFAULT_ENGINE)
    if engine not in engines():
        return []
    found = list[Problem]()
    for path, node in _nodes(settings.tree, ""):
        known = _at(engine_config(engine), path)
        texts = (name for name in node if isinstance(name, str))  # a mapping of the user's own may have numbers
        names = [name for name in texts if name not in known and not name.startswith("_")]
        if names and path:
            problems = _within(path, node, names, engine)
            found += [replace(one, warning=True) for one in problems] if _may_be_read(settings, path) else problems
        elif names:
            found += [problem for name in names if (problem := _node(name, node[name])) is not None]
    return found


def _may_be_read(settings: Settings, path: str) -> bool:
    """Whether code of the user's gets the node as it is, or verl does not make it: a key there stops no run."""
    off = [("critic", needs_critic(settings)), ("actor_rollout_ref.ref", needs_reference(settings))]
    off += [("reward.reward_model", has_reward_model(settings)), ("distillation", has_teacher(settings))]
    unused = any(f"{path}.".startswith(f"{node}.") for node, used in off if not used)
    own_data = path.partition(".")[0] == "data" and settings.get("data.custom_cls.path") is not None
    return unused or own_data or has_own_code(settings)


def _nodes(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every node with its key, but those that are passed on as they are, and what is below them."""
    yield path, node
    for name, value in node.items():
        own = path or name not in CHECKED_ELSEWHERE
        if isinstance(value, Mapping) and own and PASSED_ON.fullmatch(str(name)) is None:
            yield from _nodes(value, f"{path}.{name}".lstrip("."))


def _at(tree: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    node: Any = tree
    for part in path.split(".") if path else ():
        node = node.get(part) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def _within(path: str, node: Mapping[str, Any], names: Sequence[str], engine: str) -> list[Problem]:
    """The problems of names that verl's config of the engine does not have in a node."""
    target = node.get(TARGET, _at(engine_config(engine), path).get(TARGET))
    taken = fields_of(target) if isinstance(target, str) and target.startswith("verl.") else None
    if isinstance(target, str) and (not path.startswith(NEVER_MADE) or path.startswith("reward.reward_model.rollout")):
        taken = frozenset(names) if taken is None else taken
        wrong = (name for name in names if name not in taken and not _is_ours(path, name, node[name]))
        return [_refused(path, name, node[name], sorted(taken), engine) for name in wrong]
    known = _names_at(path) | (taken or frozenset())
    if path.partition(".")[0] not in NODES or not _names_at(path):
        return []
    found = (_ignored(path, name, node[name], sorted(known), engine) for name in names if name not in known)
    return [problem for problem in found if problem is not None]


def _refused(path: str, name: str, value: object, taken: Sequence[str], engine: str) -> Problem:
    key = f"{path}.{name}"
    others = [other for other in engines() if other != engine and key in engine_keys(other)]
    if others:
        reason = f"is a key of {ENGINE}={others[0]}, and the engine is {engine}"
        return Problem(key, value, reason, f"Leave it out, or write {ENGINE}={others[0]}")
    way_out = _did_you_mean(path, name, taken, ALIKE) or "Leave it out: verl takes no other keys there"
    return Problem(key, value, "is not a known key", way_out)


def _ignored(path: str, name: str, value: object, known: Sequence[str], engine: str) -> Problem | None:
    key, is_node = f"{path}.{name}", isinstance(value, Mapping)
    if _is_read(path, name):
        return None
    if almost := _did_you_mean(path, name, known, ALMOST):
        return Problem(key, value, "is not a known key", f"{almost} {OF_YOURS}", warning=is_node)
    if is_node:  # one of the user's own
        return None
    hint = _did_you_mean(path, name, known, ALIKE) or _in_other_nodes(name, engine)
    reason = "is not a known key, and verl does not read it"
    return Problem(key, value, reason, f"{hint} Leave it out, unless code of yours reads it".lstrip(), warning=True)


def _node(name: str, value: object) -> Problem | None:
    """The problem of a node of the whole config that has keys of one with almost its name."""
    near = get_close_matches(name, NODES, n=1, cutoff=ALMOST)
    if not near or not isinstance(value, Mapping) or not value.keys() & _names_at(near[0]):
        return None
    return Problem(name, dict(value), "is not a known key", f"{nearest(name, near)} {OF_YOURS}")


def _did_you_mean(path: str, name: str, known: Sequence[str], cutoff: float) -> str:
    near = get_close_matches(name, known, n=1, cutoff=cutoff)
    return nearest(name, near, f"{path}.") if near else ""


def _in_other_nodes(name: str, engine: str) -> str:
    keys = sorted(key for key in engine_keys(engine) if key.startswith(NODES) and key.rpartition(".")[2] == name)
    return f"Did you mean {' or '.join(keys)}?" if 0 < len(keys) <= LISTED else ""


@cache
def _names_at(path: str) -> frozenset[str]:
    """The names in a node of verl's config, with any engine, or of this package's files."""
    trees = [*map(engine_config, engines()), read_yaml(HERE / "seamless_ppo_trainer.yaml"), *_platforms()]
    return frozenset(name for tree in trees for name in _at(tree, path) if not name.startswith("_"))


@cache
def _platforms() -> tuple[Mapping[str, Any], ...]:
    return tuple(map(read_yaml, sorted((HERE / "platform").glob("*.yaml"))))


def _is_ours(path: str, name: str, value: object) -> bool:
    """Whether a platform's file has the node, and each key in it: these are of Megatron, whatever the engine is."""
    inner = _keys(value)
    return any(name in _at(tree, path) and inner <= _keys(_at(tree, path)[name]) for tree in _platforms())


def _keys(node: object) -> set[str]:
    return {key for key, _ in items_of(node)} if isinstance(node, Mapping) else set()


def _is_read(path: str, name: str) -> bool:
    """Whether verl's source reads the name, which its files do not have, from such a node."""
    node, source = re.escape(path.rpartition(".")[2]), _source()
    config = rf"(?:\w*(?:config|cfg)|{node})"
    got = rf"""["']{node}["'](?:,\s*\w*\{{?\}}?)?\)"""  # of config.get("node", {})
    before = re.compile(rf"""(?:\b{config}|{got})(?:\.get\(\s*|\[|,\s*)["']$|\b{node}\.$""")
    after = re.compile(rf"""["'] in (?:\w+\.)*?{config}\b""")
    for found in re.finditer(rf"\b{re.escape(name)}\b", source):
        start, end = found.span()
        if before.search(source[max(start - 80, 0) : start]) or after.match(source[end : end + 80]):
            return True
    return False


@cache
def _source() -> str:
    files = sorted(verl_config_dir().parents[1].rglob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
