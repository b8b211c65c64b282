"""run.sh of the recipes with agents of other people: settings, the installation, and a folder that the user names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.integration
PROGRAMS = {"openai_agents": "python", "claude_code": "claude", "codex": "codex"}
INSTALLER = "#!/bin/sh\ntouch {called}\necho 'no network' >&2\nexit 7\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """This one with an installation of agents that fails."""
    made = tmp_path / "checkout"
    shutil.copytree(ROOT / "recipes", made / "recipes")
    (made / "scripts").mkdir()
    (made / "scripts" / "agents").write_text(INSTALLER.format(called=tmp_path / "called"))
    (made / "scripts" / "agents").chmod(0o755)
    return made


def run(checkout: Path, recipe: str, *overrides: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "AGENTS"}
    env |= {"PYTHON": sys.executable, "VERL_PLATFORM": "cpu", "DATA": str(checkout.parent / "data")} | variables
    command = [checkout / "recipes" / recipe / "run.sh", *overrides]
    return subprocess.run(command, env=env, cwd=checkout.parent, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("recipe", PROGRAMS)
def test_a_failed_installation_ends_it(checkout: Path, recipe: str) -> None:
    done = run(checkout, recipe)
    assert done.returncode == 7 and done.stderr.endswith("no network\n")
    assert not (checkout.parent / "data" / "train.parquet").exists()


@pytest.mark.parametrize("recipe", PROGRAMS)
def test_a_mistake_is_refused_before_anything_is_installed(checkout: Path, recipe: str) -> None:
    done = run(checkout, recipe, "seamless.max_staleness=-1")
    assert done.returncode == 2 and "seamless.max_staleness=-1" in done.stderr
    assert not (checkout.parent / "called").exists()


@pytest.mark.parametrize(("recipe", "program"), PROGRAMS.items())
def test_a_folder_without_the_program_is_refused(checkout: Path, recipe: str, program: str) -> None:
    (folder := checkout.parent / "bin").mkdir()
    done = run(checkout, recipe, AGENTS=str(folder))
    assert done.returncode == 2 and done.stderr.startswith(f"AGENTS={folder}: there is no {program} ")
    assert not (checkout.parent / "called").exists()
