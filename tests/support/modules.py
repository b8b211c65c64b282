"""Loads files that are no modules of a package: scripts, and the sources of pictures."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any


def load_file(path: Path) -> Any:
    """The file as a module; it need not end in `.py`."""
    loader = SourceFileLoader(path.stem, str(path))
    spec = spec_from_loader(path.stem, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
