"""Importing pure packages brings in nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.purity import HEAVY

pytestmark = pytest.mark.integration
PURE = (
    "errors",
    "config",
    "runtime.process",
    "runtime.scratch",
    "runtime.supervisor",
    "runtime.checkpoint_cleanup",
    "runtime.checkpoint_marker",
    "tiny",
    "main_ppo",
    "check",
    "platform.adaptation",
    "resources.machines",
    *(f"trajectory.{name}" for name in ("sequences", "policies", "session")),
    *(f"tools.trajectories.{name}" for name in ("command", "drift", "session_text")),
    "tools.plan.command",
    "journal",
    "rollout.call",
    "tools.bench.stub_engine",
    "transport",
    "tools.bench.journal",
    "algorithms.samplers",
    *(f"resources.{name}" for name in ("ledger", "ahead", "lending")),
    "tools.simulator.__main__",
    "tools.simulator.calibrate_command",
    "tools.simulator.optimize_command",
    "agents.command",
    "agents.callable",
    "client",
    "client.runner",
    "cli.runner",
    "cli.main",
    "tools.doctor.gather",
    *(f"tools.compare.{name}" for name in ("arms", "figures", "page", "probe", "series", "store")),
    "runtime.step_metrics",
    "trainer.step_log",
    "shared_prefixes.layout",
    *(f"tools.view.{name}" for name in ("run", "server", "__main__")),
    *(f"resources.{name}" for name in ("plan", "memory_fit")),
    *(f"tools.compare.{name}" for name in ("engine_baseline", "forced_work", "workloads")),
)
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
