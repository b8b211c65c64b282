"""The recipes' scripts as modules, for their tests."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from support.paths import RECIPES, ROOT

SWE_AGENT = RECIPES / "swe_agent"


def load(recipe: Path, *names: str) -> list[ModuleType]:
    """The recipe's modules, which import one another by these plain names; the names are free again after."""
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(recipe))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(recipe))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def agents_environment() -> Path:
    """The environment of the swe_agent recipe's agents, where a run of the recipe has it; made when it is missing."""
    where = Path(os.environ.get("AGENT_ENV") or ROOT / "runs" / "swe_agent" / "agent-venv")
    subprocess.run([SWE_AGENT / "setup.sh", where], env=os.environ | {"PYTHON": sys.executable}, check=True)
    return where
