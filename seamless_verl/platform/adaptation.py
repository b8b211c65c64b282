"""Adaptations of host libraries: a record for each symbol that is touched, and names of verl replaced for one call.

A record names the symbol, the version it was written for, and why. `verify` fails with the adaptation's name when the
host has changed, so that an upgrade breaks loudly and in one place.

`rebound` replaces names in a module of the host for the length of a block. verl names its worker group inside a long
method and offers no factory. Rebinding the name while that method runs, in the one process that runs the `seamless`
trainer, is the smallest change: every other mode and process sees verl unchanged.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from seamless_verl.errors import HostMovedError

WRITTEN_FOR = "verl 0.9.1"


@dataclass(frozen=True)
class Adaptation:
    """One symbol of a host library that this package replaces, extends or relies on."""

    name: str
    symbol: str  # "package.module:attribute.path"
    written_for: str  # "megatron-core 0.16.1"
    reason: str
    expects: str = ""  # text of inspect.signature, with or without what it returns; "" when it is no callable

    def find(self) -> object:
        """Return the adapted object of the host.

        Raises:
            HostMovedError: the module or the attribute is gone.
        """
        module, _, path = self.symbol.partition(":")
        try:
            found: object = importlib.import_module(module)
            for attribute in filter(None, path.split(".")):
                found = getattr(found, attribute)
        except (ImportError, AttributeError) as error:
            raise HostMovedError(self.name, self.symbol, self.written_for, str(error)) from error
        return found

    def verify(self) -> object:
        """Return the adapted object after checking its signature.

        Raises:
            HostMovedError: the symbol is gone or its signature is another one.
        """
        found = self.find()
        if self.expects:
            signature = str(inspect.signature(found))  # type: ignore[arg-type]
            if self.expects not in (signature, signature.rpartition(" -> ")[0]):
                raise HostMovedError(self.name, self.symbol, self.written_for, f"signature {signature}")
        return found


@contextmanager
def rebound(module: ModuleType, **names: Any) -> Iterator[None]:
    """In the block, `names` are bound in `module`; afterwards what was there before.

    Raises:
        HostMovedError: the module has no such name any more.
    """
    missing = [name for name in names if name not in vars(module)]
    if missing:
        raise HostMovedError("seamless-trainer", f"{module.__name__}:{missing[0]}", WRITTEN_FOR, "no such name")
    before = {name: vars(module)[name] for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def plain_class(actor_class: Any) -> type:
    """The class behind `ray.remote`, which cannot itself be subclassed."""
    return getattr(actor_class, "__ray_actor_class__", actor_class)  # type: ignore[no-any-return]


class ActorClassWith:
    """Stands in for a Ray actor class: whoever starts it gives `more` arguments by name without knowing of them."""

    def __init__(self, actor_class: Any, **more: Any) -> None:
        self.actor_class, self.more = actor_class, more

    def options(self, **options: Any) -> ActorClassWith:
        return ActorClassWith(self.actor_class.options(**options), **self.more)

    def remote(self, *arguments: Any, **named: Any) -> Any:
        return self.actor_class.remote(*arguments, **named, **self.more)
