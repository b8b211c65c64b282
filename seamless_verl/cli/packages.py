"""Packages that one option alone needs, imported when it is given."""

from __future__ import annotations

import importlib
from typing import Any

from seamless_verl.errors import ConfigError


def needed(module: str, key: str, value: str, otherwise: str = "") -> Any:
    """The module; raises ConfigError naming the setting that needs it, and the package that is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        way_out = f"pip install {module.partition('.')[0]}{otherwise}"
        raise ConfigError(key, value, f"the package {error.name} is not installed", way_out) from error
