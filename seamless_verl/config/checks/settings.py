"""What a check finds, and the error that carries all findings at once.

A composed config as plain values, read by dotted key with the type that is expected there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from seamless_verl.config.schema import SeamlessConfig, usable_cores
from seamless_verl.errors import ConfigError


class AbsentError(ConfigError):
    """Data or a model that is not there, and that a recipe may be about to make."""


@dataclass(frozen=True)
class Problem:
    """A setting that cannot work, in the terms of ConfigError; a warning when it may still work."""

    key: str
    value: object
    reason: str
    way_out: str
    warning: bool = False

    @classmethod
    def of(cls, error: ConfigError, *, unmade: bool = False) -> Problem:
        """A warning for what is absent, where that may be because it is `unmade`."""
        warning = unmade and isinstance(error, AbsentError)
        return cls(error.key, error.value, error.reason, error.way_out, warning)

    def __str__(self) -> str:
        return str(ConfigError(self.key, self.value, self.reason, self.way_out))


class RefusedConfigError(ConfigError):
    """A config with at least one problem: it is the first, and its text lists the others, one a line."""

    def __init__(self, first: Problem, *others: Problem) -> None:
        super().__init__(first.key, first.value, first.reason, first.way_out)
        self.problems = (first, *others)
        self.args = self.problems

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


MISSING = "???"
UNSET = re.compile(r"Environment variable '(\w+)' not found")
Config: TypeAlias = DictConfig | Mapping[str, Any]


@dataclass(frozen=True)
class Host:
    """What the run would run on: `devices` in all (None: not known), and how many cores are usable."""

    devices: int | None = None
    accelerator: bool = False
    cores: int = 1


@dataclass(frozen=True)
class Settings:
    """Resolved values of one config; reads raise ConfigError, never an omegaconf error.

    `unmade`: data and models that are not there may come yet; what would be read of them is not known.
    """

    tree: Mapping[str, Any]
    host: Host
    unmade: bool = False

    @classmethod
    def of(cls, config: Config, *, devices: int | None, accelerator: bool, unmade: bool = False) -> Settings:
        """Resolve every interpolation once; a broken one is a ConfigError that names its key."""
        return cls(_resolved(config), Host(devices, accelerator, usable_cores()), unmade)

    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key; `default` when the key is absent or null."""
        node: Any = self.tree
        for part in key.split("."):
            if not isinstance(node, Mapping) or node.get(part) is None:
                return default
            node = node[part]
        return node

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(key, value, f"must be a whole number of at least {least}", f"Set {key}={least} or more")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise ConfigError(key, value, "must be true or false", f"Set {key}=true or {key}=false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._given(key, default)
        if not isinstance(value, str):
            raise ConfigError(key, value, "must be a text", f"Set {key} to a text")
        return value

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
    """A check for which a value it cannot read is itself the problem."""

    @wraps(body)
    def run(settings: Settings) -> list[Problem]:
        try:
            return body(settings)
        except ConfigError as error:
            return [Problem.of(error, unmade=settings.unmade)]

    return run


def _resolved(config: Config) -> Mapping[str, Any]:
    if not isinstance(config, DictConfig):
        return config
    try:
        tree = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        if (unset := UNSET.search(str(error))) is not None:
            raise _no_variable(config, unset[1]) from error
        key = str(error.full_key or "config")
        first_line = str(error).splitlines()[0]
        raise ConfigError(key, None, f"cannot be resolved: {first_line}", f"Set {key} to a value") from error
    assert isinstance(tree, dict)
    return {str(name): value for name, value in tree.items()}


def _no_variable(config: DictConfig, name: str) -> ConfigError:
    """The error of a config that reads an environment variable which is not set."""
    readers = [key for key, text in _texts(OmegaConf.to_container(config), "") if re.search(rf"oc\.env:{name}\b", text)]
    way_out = f"Write {name}=... before the command, or set {' and '.join(readers) or 'the keys that read it'}"
    return ConfigError(f"${name}", None, f"the environment variable {name} is not set", way_out)


def _texts(node: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _texts(value, f"{key}.{name}".lstrip("."))
    elif isinstance(node, str):
        yield key, node
