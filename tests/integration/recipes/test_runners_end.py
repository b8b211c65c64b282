"""A recipe whose runner cannot start ends at once: its run would wait for one until its tasks are given up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import RECIPES, TESTS

pytestmark = [pytest.mark.integration, pytest.mark.long]
MADE = RECIPES.parent / "runs"


@pytest.mark.parametrize("recipe", ["harbor_tasks", "environments", "verifiers_env"])
def test_a_run_ends_with_its_runner(recipe: str, tmp_path: Path) -> None:
    env = os.environ | {
        **{"PYTHON": sys.executable, "PYTHONPATH": str(TESTS), "MAIN": "support.idle_main", "VERL_PLATFORM": "cpu"},
        **{"DATA": str(tmp_path / "data"), "SLOTS": "0", "SANDBOX": "plain", "EPISODES": "8"},
        "VERIFIERS": os.environ.get("VERIFIERS") or str(MADE / "verifiers_env" / "verifiers"),
        "PACKAGES": os.environ.get("PACKAGES") or str(MADE / "environments" / "packages"),
    }
    if recipe != "harbor_tasks":  # of which these are folders
        env |= {"TASKS": "8", "VAL": "2"}
    run = subprocess.run([RECIPES / recipe / "run.sh"], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 2, run.stderr
    assert "--slots=0: must be at least 1" in run.stderr and "the run ends, too" in run.stderr
