"""Pure packages import nothing heavy, and each room imports only the rooms below it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "seamless_verl"
HEAVY = ("torch", "ray", "verl", "vllm", "megatron", "mbridge", "transformers", "transfer_queue")
PURE = (
    "errors",
    "config",
    "supervisor",
    "tiny",
    "main_ppo",
    *(f"trainer.{name}" for name in ("partial", "marks", "staleness", "curve", "host")),
    *(f"trajectory.{name}" for name in ("assemble", "drift", "export", "journal", "policies", "session", "show")),
    *(f"rollout.{name}" for name in ("calls", "stub", "wire")),
    "agents.command",
    "agents.call",
    "agents.load",
    "agents.group",
    "cli.main",
    *(f"bench.training.{name}" for name in ("arms", "bound", "figures", "record", "report", "running", "workloads")),
)
BELOW = {
    "errors": set(),
    "config": {"errors"},
    "supervisor": set(),
    "tiny": {"errors"},
    "platform": {"errors"},
    "trajectory": {"errors"},
    "gateway": {"errors", "trajectory", "rollout"},
    "rollout": {"errors", "trajectory"},
    "agents": {"errors"},
    "cli": {"errors", "trajectory"},
    "trainer": {"errors", "config", "platform", "rollout", "gateway", "agents", "trajectory"},
    "bench": {"errors", "config", "platform", "supervisor", "tiny"},
    "main_ppo": {"errors", "config", "platform", "trainer", "supervisor"},
}


@pytest.mark.parametrize("module", PURE)
def test_importing_it_brings_in_nothing_heavy(module: str) -> None:
    code = f"import sys, seamless_verl.{module}; print([m for m in {HEAVY} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


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
