"""The settings in which an arm differs from the first one that runs, read from their composed configs. Pure.

What a trainer does not read is no setting of its: verl's modes do not read the `seamless:` node. Beside such an arm,
ours has what is no default there, and its bound on staleness in any case.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from seamless_verl.config.schema import NODE, SeamlessConfig
from seamless_verl.runtime.fields import rows
from seamless_verl.tools.compare.arms import MODE, VERL_MODES
from seamless_verl.tools.compare.budget import select

LOSS, STALENESS = "actor_rollout_ref.actor.policy_loss.loss_mode", "seamless.max_staleness"
FIRST = (MODE, LOSS, STALENESS)  # in this order: they say what kind of training it is
PLACES = ("trainer.default_local_dir", "data.seed")
NAMES = ("experiment_name", "project_name")  # under which a run is logged
ABSENT = "not read"


@dataclass(frozen=True)
class Difference:
    """A setting of an arm, and what the first arm has there, as they are written in a config."""

    key: str
    value: str
    first: str

    def __str__(self) -> str:
        return f"{self.key}={self.value} ({self.first})"


def differences(config: Mapping[str, Any], first: Mapping[str, Any]) -> tuple[Difference, ...]:
    """The settings of an arm that differ from those of the first one; `FIRST` come first."""
    own, other, defaults = settings_read(config), settings_read(first), own_defaults()
    keys = [key for key in own | other if own.get(key, ABSENT) != other.get(key, ABSENT)]
    listed = [
        key
        for key in keys
        if key == STALENESS or key in own.keys() & other.keys() or (own | other)[key] != defaults.get(key)
    ]
    listed.sort(key=lambda key: (FIRST.index(key) if key in FIRST else len(FIRST), key))
    return tuple(Difference(key, own.get(key, ABSENT), other.get(key, ABSENT)) for key in listed)


def settings_read(config: Mapping[str, Any]) -> dict[str, str]:
    """What the trainer of this config may read, by key, without the places and the names of one run."""
    unread = f"{NODE}." if select(config, MODE) in VERL_MODES else None
    return {
        key: written(value)
        for key, value in leaves(config)
        if key not in PLACES and key.rpartition(".")[2] not in NAMES and not (unread and key.startswith(unread))
    }


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def own_defaults() -> dict[str, str]:
    """Of the `seamless:` node."""
    return {row.key: written(row.default) for row in rows(SeamlessConfig, NODE)}


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
