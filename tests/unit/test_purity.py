"""Each room imports only the rooms below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "seamless_verl"
BELOW = {
    "errors": set(),
    "locks": set(),
    "resources": {"errors"},
    "config": {"errors", "locks", "resources"},
    "runtime": set(),
    "scratch": set(),
    "supervisor": {"scratch"},
    "tiny": {"errors"},
    "platform": {"errors"},
    "trajectory": {"errors", "locks"},
    "gateway": {"errors", "trajectory", "rollout"},
    "rollout": {"errors", "trajectory"},
    "agents": {"errors"},
    "simulator": {"errors", "resources"},
    "cli": {"errors", "trajectory", "config", "resources", "platform"},
    "trainer": {"errors", "config", "platform", "rollout", "gateway", "agents", "trajectory", "resources", "runtime"},
    "bench": {"errors", "tiny", "trajectory", "rollout", "gateway", "resources", "config", "platform", "supervisor"},
    "saving": {"errors", "locks", "config", "trainer", "supervisor"},
    "main_ppo": {"errors", "config", "platform", "trainer", "supervisor", "saving"},
    "check": {"errors", "main_ppo"},
}


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
