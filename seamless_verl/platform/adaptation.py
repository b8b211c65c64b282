"""What the CPU platform adapts in its hosts, as data: one record for each symbol touched.

A record names the symbol, the version it was written against, and why. `verify` fails with the
adaptation's name when the host has moved, so that an upgrade breaks loudly and in one place.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass

from seamless_verl.errors import HostMovedError


@dataclass(frozen=True)
class Adaptation:
    """One symbol of a host library that the CPU platform replaces, extends or relies on."""

    name: str
    symbol: str  # "package.module:attribute.path"
    written_for: str  # "megatron-core 0.16.1"
    reason: str
    expects: str = ""  # text of inspect.signature, or "" when the symbol is no callable

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
            if signature != self.expects:
                raise HostMovedError(self.name, self.symbol, self.written_for, f"signature {signature}")
        return found
