"""Values of a config node that was turned into plain Python, read with the type expected there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from seamless_verl.errors import ConfigError

WORD = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")  # of names, tags and label values


def known_keys(key: str, value: object, valid: Sequence[str]) -> Mapping[str, object]:
    """The node as a mapping with none but the valid keys."""
    if not isinstance(value, Mapping):
        raise ConfigError(key, value, "must be a node with keys", f"Valid: {', '.join(valid)}")
    for name in value:
        if name not in valid:
            near = get_close_matches(str(name), valid, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{key}.{name}", value[name], "is not a known key", f"{hint}Valid: {', '.join(valid)}")
    return {str(name): item for name, item in value.items()}


def positive(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(key, value, "must be a whole number of at least 1", f"Set {key}=1")
    return value


def word(key: str, value: object) -> str:
    if not isinstance(value, str) or not WORD.fullmatch(value):
        reason = "must be a text of letters, digits and _ . - that begins and ends with a letter or digit"
        raise ConfigError(key, value, reason, f"Set {key} to one, such as a100 or zone-b")
    return value


def words(key: str, value: object) -> tuple[str, ...]:
    """Distinct words, at least one, in the order given."""
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(key, value, "must be a list with at least one tag", f"Write it as {key}=[train,rollout]")
    found = tuple(word(f"{key}[{i}]", item) for i, item in enumerate(value))
    twice = next((item for i, item in enumerate(found) if item in found[:i]), None)
    if twice is not None:
        raise ConfigError(key, list(found), f"names {twice} twice", "Name each tag once")
    return found


def labels(key: str, value: object) -> tuple[tuple[str, str], ...]:
    """Node labels, sorted by their keys; none for null."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise ConfigError(key, value, "must be a node of labels", f"Write it as {key}={{zone: b}}")
    for name in value:
        parts = name.split("/") if isinstance(name, str) else []
        if len(parts) not in (1, 2) or not all(WORD.fullmatch(part) for part in parts):
            raise ConfigError(key, name, "is not the key of a node label", "Use one such as zone or ray.io/market-type")
    return tuple(sorted((name, word(f"{key}.{name}", item)) for name, item in value.items()))
