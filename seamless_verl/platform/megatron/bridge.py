"""Imports Megatron-Bridge where Transformer Engine is not installed, on the host and on accelerators.

Some of its modules, those of adapters among them, name classes of Transformer Engine in class statements. So nothing of
it can be imported without Transformer Engine, although layers in plain torch (`layers.py`) need none of these classes.
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

BRIDGE = "megatron.bridge"
NAMED = ("transformer_engine", "modelopt", "nvidia_resiliency_ext", "mlflow")  # by classes and functions of its modules
ADAPTERS = ("peft.lora", "peft.canonical_lora", "training.checkpointing")  # which a model with adapters needs


class Absent(type):
    """A class of a package that is not installed; so are all its attributes. Nothing is an instance of it."""

    def __getattr__(cls, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Absent(name, (), {})
        setattr(cls, name, made)
        return made


def import_bridge(*, adapters: bool = False) -> None:
    """Imports Megatron-Bridge, with what `adapters` need; may be called again.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    absent = {name for name in NAMED if find_spec(name) is None}
    with absent_for(BRIDGE, absent):
        importlib.import_module(BRIDGE)
        for module in ADAPTERS if adapters else ():
            importlib.import_module(f"{BRIDGE}.{module}")
    if NAMED[0] not in absent:
        return
    # True, since Megatron-core has these names for Transformer Engine's layers without it; some of them are None.
    vars(importlib.import_module(f"{BRIDGE}.peft.utils"))["HAVE_TE"] = False


@contextmanager
def absent_for(importer: str, packages: Collection[str]) -> Iterator[None]:
    """In the block, modules of `importer` that import one of `packages` get `Absent` in its place, and no others do.

    A module under a package's name in `sys.modules` would be seen by all: Megatron-core would take its layers.
    """
    imported = builtins.__import__

    def import_or_absent(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        asks = str((globals or {}).get("__name__", ""))
        if level == 0 and name.split(".")[0] in packages and f"{asks}.".startswith(f"{importer}."):
            return Absent(name.split(".")[0], (), {})
        return imported(name, globals, locals, fromlist, level)

    builtins.__import__ = import_or_absent
    try:
        yield
    finally:
        builtins.__import__ = imported
