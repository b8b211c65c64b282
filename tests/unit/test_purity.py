"""Each room imports only the rooms below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.paths import ROOT

PACKAGE = ROOT / "seamless_verl"
BELOW = {
    "errors": set(),
    "runtime": {"errors"},
    "resources": {"errors"},
    "config": {"errors", "runtime", "resources", "agents", "journal", "algorithms"},
    "tiny": {"errors"},
    "algorithms": {"errors"},
    "platform": {"errors"},
    "agents": {"errors", "runtime"},
    "client": {"errors", "runtime"},
    "runner": {"errors", "runtime", "agents", "client"},
    "trajectory": {"errors"},
    "journal": {"errors", "runtime", "trajectory"},
    "rollout": {"errors", "trajectory"},
    "transport": {"errors", "trajectory", "rollout"},
    "testing": {"errors", "trajectory", "rollout"},
    "gateway": {"errors", "runtime", "platform", "trajectory", "journal", "rollout"},
    "data_plane": {
        *("errors", "runtime", "config", "resources", "trajectory", "journal", "rollout", "transport", "gateway"),
        "client",
    },
    "weights": {"errors", "runtime", "resources", "platform", "data_plane"},
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
    "agent_loops": {"errors", "runtime", "platform", "agents", "config", "trajectory", "data_plane"},
    "trainer": {
        *("errors", "runtime", "config", "resources", "platform", "trajectory", "journal"),
        *("rollout", "data_plane", "weights", "replica", "agent_loops", "algorithms"),
    },
    "simulator": {"errors", "runtime", "resources", "algorithms"},
    "view": {"errors", "runtime", "resources", "trajectory", "journal"},
    "doctor": {"errors", "runtime", "config", "resources", "platform"},
    "cli": {
        *("errors", "runtime", "trajectory", "journal", "config", "resources", "platform"),
        *("agents", "client", "runner", "doctor", "simulator", "compare", "view"),
    },
    "compare": {"errors", "runtime", "config", "platform", "tiny", "main_ppo"},
    "bench": {
        *("errors", "tiny", "trajectory", "journal", "rollout", "transport", "testing", "gateway"),
        *("resources", "config", "platform", "runtime", "data_plane", "weights", "replica", "compare"),
    },
    "run_folder": {"errors", "client", "config", "runtime"},
    "main_ppo": {"errors", "config", "platform", "trainer", "run_folder", "runtime", "view"},
    "check": {"errors", "config", "runtime", "main_ppo"},
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
