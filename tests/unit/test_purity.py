"""Each room imports only the rooms below it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.paths import ROOT

PACKAGE = ROOT / "seamless_verl"
BELOW = {
    "errors": set(),
    "runtime": {"errors"},
    "resources": {"errors"},
    "config": {"errors", "runtime", "resources", "agents", "journal", "algorithms"},
    "tiny": {"errors", "runtime"},
    "algorithms": {"errors"},
    "shared_prefixes": {"errors"},
    "platform": {"errors", "shared_prefixes"},
    "agents": {"errors", "runtime"},
    "client": {"errors", "runtime", "agents"},
    "trajectory": {"errors"},
    "journal": {"errors", "runtime", "trajectory"},
    "rollout": {"errors", "trajectory"},
    "transport": {"errors", "trajectory", "rollout"},
    "gateway": {"errors", "runtime", "platform", "trajectory", "journal", "rollout"},
    "data_plane": {
        *("errors", "runtime", "config", "resources", "trajectory", "journal", "rollout", "transport", "gateway"),
        "client",
    },
    "weights": {"errors", "runtime"},
    "replica": {
        "errors",
        "runtime",
        "config",
        "resources",
        "platform",
        "trajectory",
        "rollout",
        "transport",
        "weights",
    },
    "agent_loops": {"errors", "algorithms", "runtime", "platform", "agents", "config", "trajectory", "data_plane"},
    "trainer": {
        *("errors", "runtime", "config", "resources", "platform", "trajectory", "journal"),
        *("rollout", "data_plane", "weights", "replica", "agent_loops", "algorithms", "shared_prefixes"),
    },
    "cli": {"errors", "runtime", "config", "agents", "client"},
    "run_folder": {"errors", "client", "config", "runtime"},
    "main_ppo": {"errors", "config", "platform", "trainer", "run_folder", "runtime"},
    "check": {"errors", "config", "runtime", "main_ppo"},
    "tools.plan": {"errors", "resources", "platform", "config", "trajectory", "cli"},
    "tools.trajectories": {"errors", "runtime", "trajectory", "journal", "cli"},
    "tools.simulator": {
        *("errors", "runtime", "resources", "algorithms", "cli", "config"),
        *("tools.compare", "tools.plan", "tools.view"),
    },
    "tools.view": {"errors", "runtime", "resources", "trajectory", "journal", "cli", "tools.trajectories"},
    "tools.doctor": {"errors", "runtime", "config", "resources", "platform", "trajectory", "journal", "cli"},
    "tools.compare": {"errors", "runtime", "config", "platform", "tiny", "main_ppo", "cli", "resources"},
    "tools.bench": {
        *("errors", "tiny", "trajectory", "journal", "rollout", "transport", "gateway"),
        *("resources", "config", "platform", "runtime", "data_plane", "weights", "replica", "cli", "tools.compare"),
    },
}
"""Rooms, and what each may import. Nothing of the product has a tool: those are started, by name."""


def rooms_imported(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {room_of(name.split(".")[1:]) for name in names if name.startswith("seamless_verl.")}


def room_of(parts: Sequence[str]) -> str:
    """A folder, or one of the package's own files; each tool is a room."""
    return ".".join(parts[:2]) if parts[0] == "tools" else parts[0]


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_run_one_way(file: Path) -> None:
    room = room_of(file.relative_to(PACKAGE).with_suffix("").parts)
    if not room.endswith("__init__"):
        assert rooms_imported(file) <= BELOW[room] | {room}
