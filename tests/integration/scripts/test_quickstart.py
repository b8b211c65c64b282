"""scripts/quickstart, as far as it goes without training."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="quickstart would install everything"),
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """This one, but for its scripts, which look for everything beside them, and what its runs left."""
    for one in ROOT.iterdir():
        if one.name not in {"runs", "scripts"}:
            (tmp_path / one.name).symlink_to(one)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    return tmp_path


def test_a_mistake_takes_nothing_of_the_last_run_away(checkout: Path) -> None:
    last = checkout / "runs/quickstart"
    model, log = last / "checkpoints/seamless/global_step_80/model", last / "log.txt"
    model.parent.mkdir(parents=True)
    model.write_text("trained")
    log.write_text("the last run's")
    env = {name: value for name, value in os.environ.items() if name != "DATA"}
    command = [str(checkout / "scripts/quickstart"), "seamless.max_staleness=-1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "seamless.max_staleness=-1" in done.stderr
    assert (model.read_text(), log.read_text()) == ("trained", "the last run's")
