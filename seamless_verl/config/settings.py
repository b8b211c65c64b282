"""The inputs and outputs of checks: a composed config as plain values, and the problems that checks find in it.

Invariants: a read by dotted key gives a value of the expected type or raises ConfigError, never an error of omegaconf.
A check returns problems; it does not raise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, TypeAlias, cast

from annotated_types import Ge
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from seamless_verl.config.schema import SeamlessConfig, usable_cores
from seamless_verl.errors import ConfigError
from seamless_verl.runtime.fields import read_value


class AbsentError(ConfigError):
    """Data or a model does not exist; a recipe may be about to make it."""


class Problem(ConfigError):
    """A setting that cannot work, as a check returns it; a warning when it may still work.

    `unmade`: it concerns data or a model that is absent, or may be made anew before the run.
    """

    warning: bool = False
    unmade: bool = False

    @classmethod
    def all_of(cls, error: ConfigError, *, unmade: bool = False) -> list[Problem]:
        """The problems of an error that may carry several: warnings for what is absent, where it may be made yet."""
        return [
            cls(one.key, one.value, one.reason, one.way_out, warning=absent, unmade=absent)
            for one in error.mistakes
            for absent in [unmade and isinstance(one, AbsentError)]
        ]

    def changed(self, **fields: Any) -> Problem:
        """The same with other values of these fields."""
        return Problem(**vars(self) | fields)


VARIABLE = re.compile(r"\$\{oc\.env:(\w+)")


def named_by_variable(problem: Problem, config: Config) -> Problem:
    """The problem of a value that the config takes from an environment variable: that is what its user has set."""
    node: Any = OmegaConf.to_container(config, resolve=False) if isinstance(config, DictConfig) else config
    for part in problem.key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    found = [name for name in VARIABLE.findall(str(node)) if name in os.environ]
    if not found:
        return problem
    reason = f"{problem.key}={problem.value!r}, which it is part of, {problem.reason}"
    way_out = f"Set {found[0]} to another value, or s{problem.way_out[1:]}"
    if not problem.way_out.startswith("Set "):
        way_out = f"{problem.way_out}, or set {found[0]} to another value"
    return problem.changed(key=f"${found[0]}", value=os.environ[found[0]], reason=reason, way_out=way_out)


MISSING = "???"
UNSET = re.compile(r"Environment variable '(\w+)' not found")
Config: TypeAlias = DictConfig | Mapping[str, Any]


@dataclass(frozen=True)
class Host:
    """The machine of a run: `devices` in all (None: not known), and how many cores this process may use.

    `elsewhere`: the run is for machines with accelerators, and this one has none.
    """

    devices: int | None = None
    accelerator: bool = False
    cores: int = 1
    elsewhere: bool = False


@dataclass(frozen=True)
class Settings:
    """Resolved values of one config; reads raise ConfigError, never an omegaconf error.

    `unmade`: data and models may be made before the run, or be on another machine; what would be read from them is
    not known.
    """

    tree: Mapping[str, Any]
    host: Host
    unmade: bool = False

    @classmethod
    def of(
        cls,
        config: Config,
        *,
        devices: int | None,
        accelerator: bool,
        unmade: bool = False,
        elsewhere: bool = False,
    ) -> Settings:
        """Resolve every interpolation once; a broken one is a ConfigError that names its key."""
        host = Host(devices, accelerator, usable_cores(), elsewhere)
        return cls(resolved_tree(config), host, unmade or elsewhere)

    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key; `default` when the key is absent or null."""
        node: Any = self.tree
        for part in key.split("."):
            if not isinstance(node, Mapping) or node.get(part) is None:
                return default
            node = node[part]
        return node

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        return cast(int, read_value(Annotated[int, Ge(least)], self._given(key, default), key=key))

    def flag(self, key: str, default: bool = False) -> bool:
        return cast(bool, read_value(bool, self._given(key, default), key=key))

    def text(self, key: str, default: str | None = None) -> str:
        return cast(str, read_value(str, self._given(key, default), key=key))

    def _given(self, key: str, default: object) -> Any:
        value = self.get(key, default)
        if value is None or value == MISSING:
            raise ConfigError(key, value, "has no value", f"Add {key}=... to the command")
        return value

    @property
    def mode(self) -> str:
        return self.text("trainer.v1.trainer_mode")

    @property
    def seamless(self) -> SeamlessConfig:
        return SeamlessConfig.parse(self.get("seamless"))


Check = Callable[[Settings], list[Problem]]


def check(body: Check) -> Check:
    """Make a check report the values that it cannot read as problems."""

    @wraps(body)
    def run(settings: Settings) -> list[Problem]:
        try:
            return body(settings)
        except ConfigError as error:
            return Problem.all_of(error, unmade=settings.unmade)

    return run


def resolved_tree(config: Config) -> Mapping[str, Any]:
    """The config as plain values. ConfigError that names the key of an interpolation that cannot be resolved."""
    if not isinstance(config, DictConfig):
        return config
    try:
        tree = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        if (unset := UNSET.search(str(error))) is not None:
            raise _unset_variable(config, unset[1]) from error
        key = str(error.full_key or "config")
        first_line = str(error).splitlines()[0]
        raise ConfigError(key, None, f"cannot be resolved: {first_line}", f"Set {key} to a value") from error
    assert isinstance(tree, dict)
    return {str(name): value for name, value in tree.items()}


def _unset_variable(config: DictConfig, name: str) -> ConfigError:
    """The error of a config that reads an environment variable which is not set."""
    readers = [
        key for key, text in texts_of(OmegaConf.to_container(config), "") if re.search(rf"oc\.env:{name}\b", text)
    ]
    way_out = f"Write {name}=... before the command, or set {' and '.join(readers) or 'the keys that read it'}"
    return ConfigError(f"${name}", None, f"the environment variable {name} is not set", way_out)


def texts_of(node: object, key: str) -> Iterator[tuple[str, str]]:
    """Every text below a node, with its key."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from texts_of(value, f"{key}.{name}".lstrip("."))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from texts_of(value, f"{key}[{number}]")
    elif isinstance(node, str):
        yield key, node
