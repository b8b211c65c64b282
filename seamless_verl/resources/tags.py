"""Parses `seamless.resources`: groups of machines with capability tags, and the layout that follows from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from seamless_verl.errors import ConfigError, refuse

T = TypeVar("T")
WORD = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")  # of names, tags and label values


def known_keys(key: str, value: object, valid: Sequence[str]) -> Mapping[str, object]:
    """The node as a mapping that has none but the valid keys; ConfigError otherwise."""
    if not isinstance(value, Mapping):
        raise ConfigError(key, value, "must be a node with keys", f"Valid: {', '.join(valid)}")
    mistakes = list[ConfigError]()
    for name in value:
        if name not in valid:
            near = get_close_matches(str(name), valid, n=1)
            way_out = f"{f'Did you mean {near[0]}? ' if near else ''}Valid: {', '.join(valid)}"
            mistakes.append(ConfigError(f"{key}.{name}", value[name], "is not a known key", way_out))
    refuse(mistakes)
    return {str(name): item for name, item in value.items()}


def parse_all(parsers: Iterable[Callable[[], T]]) -> list[T]:
    """The result of each parser; ConfigError or ConfigErrors with the mistakes of all."""
    results, mistakes = list[T](), list[ConfigError]()
    for parse in parsers:
        try:
            results.append(parse())
        except ConfigError as error:
            mistakes += error.mistakes
    refuse(mistakes)
    return results


def parse_positive(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(key, value, "must be a whole number of at least 1", f"Set {key}=1")
    return value


def parse_word(key: str, value: object) -> str:
    if not isinstance(value, str) or not WORD.fullmatch(value):
        reason = "must be a text of letters, digits and _ . - that begins and ends with a letter or digit"
        raise ConfigError(key, value, reason, f"Set {key} to one, such as a100 or zone-b")
    return value


def parse_words(key: str, value: object) -> tuple[str, ...]:
    """Distinct words, at least one, in the order given."""
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(key, value, "must be a list with at least one tag", f"Write it as {key}=[train,rollout]")
    found = tuple(parse_word(f"{key}[{i}]", item) for i, item in enumerate(value))
    duplicate = next((item for i, item in enumerate(found) if item in found[:i]), None)
    if duplicate is not None:
        raise ConfigError(key, list(found), f"names {duplicate} twice", "Name each tag once")
    return found


def parse_labels(key: str, value: object) -> tuple[tuple[str, str], ...]:
    """Node labels, sorted by their keys; none for null."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise ConfigError(key, value, "must be a node of labels", f"Write it as {key}={{zone: b}}")
    for name in value:
        parts = name.split("/") if isinstance(name, str) else []
        if len(parts) not in (1, 2) or not all(WORD.fullmatch(part) for part in parts):
            raise ConfigError(key, name, "is not the key of a node label", "Use one such as zone or ray.io/market-type")
    return tuple(sorted((name, parse_word(f"{key}.{name}", item)) for name, item in value.items()))


KEY = "seamless.resources"
TRAIN, ROLLOUT = "train", "rollout"
CRITIC, REFERENCE, REWARD, TEACHER = "critic", "ref", "reward", "teacher"
ROLE_TAGS = (TRAIN, ROLLOUT, CRITIC, REFERENCE, REWARD, TEACHER)


class Layout(StrEnum):
    """Where the `seamless` trainer generates."""

    AUTO = "auto"
    """as `seamless.resources` says; without it disaggregated when verl's rollout pool has devices, else colocated"""
    COLOCATED = "colocated"
    """on the trainer's own devices"""
    DISAGGREGATED = "disaggregated"
    """on devices that do not train"""
    MULTIPLEXED = "multiplexed"
    """on devices that do not train and, while the trainer waits, on the trainer's devices"""

    @property
    def shares_devices(self) -> bool:
        """Whether replicas are on the trainer's devices."""
        return self in (Layout.COLOCATED, Layout.MULTIPLEXED)

    @property
    def has_own_devices(self) -> bool:
        """Whether replicas are on devices that never train."""
        return self in (Layout.DISAGGREGATED, Layout.MULTIPLEXED)


@dataclass(frozen=True)
class MachineGroup:
    """`count` machines alike, with `devices` devices each; `labels` are what Ray knows such a node by."""

    name: str
    count: int
    devices: int
    tags: tuple[str, ...]
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.count * self.devices

    def __str__(self) -> str:
        labels = "".join(f", {key}={value}" for key, value in self.labels)
        return f"{self.name} ({self.count} x {self.devices} devices, tags {'+'.join(self.tags)}{labels})"

    @classmethod
    def parse(cls, key: str, node: object, number: int) -> MachineGroup:
        values = known_keys(key, node, [f.name for f in fields(cls)])
        parsers: dict[str, Callable[[str, Any], Any]] = {
            "name": parse_word,
            "count": parse_positive,
            "devices": parse_positive,
            "tags": parse_words,
            "labels": parse_labels,
        }

        def parse(name: str) -> Any:
            value = values.get(name)
            if value is None and name in ("count", "devices", "tags"):
                raise ConfigError(f"{key}.{name}", None, "has no value", f"Add {name} to {key}")
            return parsers[name](f"{key}.{name}", f"group{number}" if value is None and name == "name" else value)

        return cls(*parse_all(partial(parse, name) for name in parsers))


@dataclass(frozen=True)
class Resources:
    """All machine groups of a run, in the user's order."""

    groups: tuple[MachineGroup, ...]

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        for i, name in enumerate(names):
            if name in names[:i]:
                way_out = f"Give each group a name of its own; {KEY}[{names.index(name)}] has this one too"
                raise ConfigError(f"{KEY}[{i}].name", name, "is the name of another group", way_out)
        for tag, what in ((TRAIN, "trains"), (ROLLOUT, "generates")):
            self.require(tag, f"nothing {what}")

    @classmethod
    def parse(cls, node: object) -> Resources | None:
        """The value of `seamless.resources` as plain lists and mappings; None for null or an empty list.

        Raises:
            ConfigError: names the group, the tag or key, the value and the way out.
        """
        if node is None or (isinstance(node, (list, tuple)) and not node):
            return None
        if not isinstance(node, (list, tuple)):
            raise ConfigError(KEY, node, "must be a list of machine groups", f"Write it as {KEY}=[{EXAMPLE}]")
        return cls(
            tuple(parse_all(partial(MachineGroup.parse, f"{KEY}[{i}]", group, i) for i, group in enumerate(node)))
        )

    @property
    def layout(self) -> Layout:
        trains, generates = self.tagged(TRAIN), self.tagged(ROLLOUT)
        if trains == generates:
            return Layout.COLOCATED
        return Layout.MULTIPLEXED if set(trains) & set(generates) else Layout.DISAGGREGATED

    @property
    def size(self) -> int:
        """Devices in all."""
        return sum(group.size for group in self.groups)

    def tagged(self, tag: str, *, without: str | None = None) -> tuple[MachineGroup, ...]:
        """The groups with the tag, less those that also have `without`."""
        return tuple(group for group in self.groups if tag in group.tags and without not in group.tags)

    def require(self, tag: str, consequence: str) -> tuple[MachineGroup, ...]:
        """The groups with the tag; ConfigError, which names the consequence, when there are none."""
        found = self.tagged(tag)
        if not found:
            reason = f"no machine has the tag {tag}, so {consequence}"
            raise ConfigError(KEY, self.summary(), reason, self._typo_hint(tag) + f"Add {tag} to the tags of a group")
        return found

    def summary(self) -> str:
        """One line of all groups, short enough for a message."""
        return "; ".join(map(str, self.groups))

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag that is used: verl's roles first, then the user's own tags, in order of appearance."""
        used = list(dict.fromkeys(tag for group in self.groups for tag in group.tags))
        return (*(tag for tag in ROLE_TAGS if tag in used), *(tag for tag in used if tag not in ROLE_TAGS))

    def slips(self) -> list[tuple[int, str, str]]:
        """Tags of the user's own that are one edit from `train` or `rollout`: the group's number, tag, and which."""
        return [
            (i, tag, meant)
            for i, group in enumerate(self.groups)
            for tag in group.tags
            for meant in (TRAIN, ROLLOUT)
            if tag not in ROLE_TAGS and is_one_edit(tag, meant)
        ]

    def _typo_hint(self, tag: str) -> str:
        near: Sequence[str] = get_close_matches(tag, [name for name in self.tags if name not in ROLE_TAGS], n=1)
        return f"Is {near[0]} a slip for {tag}? " if near else ""


def is_one_edit(text: str, other: str) -> bool:
    """Whether the texts differ by one letter more, fewer or replaced, or by two neighbours exchanged."""
    shorter, longer = sorted((text, other), key=len)
    first = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter))
    if len(shorter) != len(longer):
        return shorter[first:] == longer[first + 1 :]
    a, b = shorter[first:], longer[first:]
    return a != b and (a[1:] == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:]))


EXAMPLE = "{count: 1, devices: 8, tags: [train, rollout]}"
