"""Find a user's agent by its name: `pkg.module:name`, or `path/to/file.py:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from seamless_verl.errors import ConfigError


def load_agent(where: str, *, key: str = "agent") -> Callable[..., Any]:
    """The callable at `where`; a file is run anew each time, so load once and keep it.

    Raises ConfigError, with `key` as the setting's name, for a place that is not there, a module whose
    import raises (that error is the cause), a missing name, and a name that cannot be called.
    """
    place, _, name = where.rpartition(":")
    if not place or not name:
        raise ConfigError(key, where, "is not of the form place:name", "Write pkg.module:name or path/to/file.py:name")
    module = load_file(Path(place), where, key) if place.endswith(".py") else load_module(place, where, key)
    try:
        agent = attrgetter(name)(module)
    except AttributeError as error:
        named = ", ".join(item for item in vars(module) if not item.startswith("_"))
        raise ConfigError(key, where, f"{place} has no '{name}'", f"It has: {named or 'nothing'}") from error
    if not callable(agent):
        way_out = "Name an `async def agent(task, endpoint)`"
        raise ConfigError(key, where, f"'{name}' is a {type(agent).__name__}, which cannot be called", way_out)
    return agent  # type: ignore[no-any-return]


def load_module(place: str, where: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise broken(key, where, error) from error
        way_out = "Install it or put its folder on PYTHONPATH, or name a file as path/to/file.py:name"
        raise ConfigError(key, where, f"there is no module '{error.name}'", way_out) from error
    except Exception as error:  # the user's module may raise anything
        raise broken(key, where, error) from error


def load_file(path: Path, where: str, key: str) -> ModuleType:
    if not path.is_file():
        way_out = f"Paths are taken from the working directory, {Path.cwd()}"
        raise ConfigError(key, where, f"there is no file {path}", way_out)
    name = f"seamless_agent_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a path that ends in .py has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's file may raise anything
        del sys.modules[name]
        raise broken(key, where, error) from error
    return module


def broken(key: str, where: str, error: Exception) -> ConfigError:
    reason = f"importing it raised {type(error).__name__}: {error}"
    return ConfigError(key, where, reason, "Import it by itself to see the whole traceback")
