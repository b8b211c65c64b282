"""Pure packages import nothing heavy, and each room imports only the rooms below it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from purity_cases import HEAVY

PACKAGE = Path(__file__).parents[2] / "seamless_verl"
PURE = (
    "errors",
    "config",
    "scratch",
    "supervisor",
    "tiny",
    "main_ppo",
    "check",
    *(f"trainer.{name}" for name in ("partial", "marks", "curve", "host", "machines")),
    *(f"trajectory.{name}" for name in ("assemble", "drift", "export", "journal", "policies", "session", "show")),
    *(f"rollout.{name}" for name in ("calls", "stub", "wire")),
    *(f"resources.{name}" for name in ("ledger", "ledger.drawing", "watchdog", "staleness", "lending")),
    "simulator.__main__",
    "agents.command",
    "agents.call",
    "agents.load",
    "agents.group",
    "cli.main",
    *(f"resources.{name}" for name in ("plan", "as_json", "fitting")),
    *(f"bench.training.{name}" for name in ("arms", "bound", "figures", "record", "report", "running", "workloads")),
)
BELOW = {
    "errors": set(),
    "resources": {"errors"},
    "config": {"errors", "resources"},
    "scratch": set(),
    "supervisor": {"scratch"},
    "tiny": {"errors"},
    "platform": {"errors"},
    "trajectory": {"errors"},
    "gateway": {"errors", "trajectory", "rollout"},
    "rollout": {"errors", "trajectory"},
    "agents": {"errors"},
    "simulator": {"errors", "resources"},
    "cli": {"errors", "trajectory", "config", "resources", "platform"},
    "trainer": {"errors", "config", "platform", "rollout", "gateway", "agents", "trajectory", "resources"},
    "bench": {"errors", "tiny", "trajectory", "rollout", "gateway", "resources", "config", "platform", "supervisor"},
    "main_ppo": {"errors", "config", "platform", "trainer", "supervisor"},
    "check": {"errors", "main_ppo"},
}


CODE = f"""
import importlib, json, sys
found = {{}}
for module in sys.argv[1:]:
    importlib.import_module("seamless_verl." + module)
    found[module] = [name for name in {HEAVY} if name in sys.modules]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def brought_in() -> dict[str, list[str]]:
    """What is loaded after each import, one after the other in one process: the first with something is to blame."""
    command = [sys.executable, "-c", CODE, *PURE]
    found: dict[str, list[str]] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


@pytest.mark.parametrize("module", PURE)
def test_importing_it_brings_in_nothing_heavy(module: str, brought_in: dict[str, list[str]]) -> None:
    assert brought_in[module] == []


def rooms_imported(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    parts = (name.split(".") for name in names if name.startswith("seamless_verl."))
    return {part[1] for part in parts}


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_run_one_way(file: Path) -> None:
    room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room != "__init__":
        assert rooms_imported(file) <= BELOW[room] | {room}
