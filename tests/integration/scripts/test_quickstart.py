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


def left_by_a_run(checkout: Path) -> tuple[Path, Path]:
    """A file of its checkpoints, and its log."""
    last = checkout / "runs/quickstart"
    model, log = last / "checkpoints/seamless/global_step_80/model", last / "log.txt"
    model.parent.mkdir(parents=True)
    model.write_text("trained")
    log.write_text("the last run's")
    return model, log


def quickstart(
    checkout: Path, *arguments: str, cwd: Path | None = None, **data: str
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "DATA"} | data
    command = [str(checkout / "scripts/quickstart"), *arguments]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_a_mistake_takes_nothing_of_the_last_run_away(checkout: Path) -> None:
    model, log = left_by_a_run(checkout)
    done = quickstart(checkout, "seamless.max_staleness=-1")
    assert done.returncode == 2 and "seamless.max_staleness=-1" in done.stderr
    assert (model.read_text(), log.read_text()) == ("trained", "the last run's")


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_to_ask_for_help_takes_nothing_away(checkout: Path, option: str) -> None:
    model, log = left_by_a_run(checkout)
    done = quickstart(checkout, "trainer.total_training_steps=5", option)
    assert done.returncode == 0 and done.stdout.startswith("usage: scripts/quickstart") and not done.stderr
    assert (model.read_text(), log.read_text()) == ("trained", "the last run's")


@pytest.mark.parametrize("options", [("--cfg", "job"), ("--info",), ("--hydra-help",), ("-m",)])
def test_options_of_hydra_are_refused_before_anything_is_removed(checkout: Path, options: tuple[str, ...]) -> None:
    model, log = left_by_a_run(checkout)
    done = quickstart(checkout, *options)
    assert done.returncode == 2 and done.stderr.startswith(f"{options[0]}: ")
    assert f"recipes/arithmetic_grpo/run.sh {options[0]}" in done.stderr
    assert (model.read_text(), log.read_text()) == ("trained", "the last run's")


def test_a_folder_of_the_users_is_taken_from_where_the_command_is_given(checkout: Path) -> None:
    """A run that is refused there leaves its log."""
    here = checkout.parent / f"{checkout.name}-caller"
    (here / "mine").mkdir(parents=True)
    (here / "mine" / "log.txt").write_text("the last run's")
    done = quickstart(checkout, "seamless.max_staleness=-1", cwd=here, DATA="mine")
    assert done.returncode == 2 and "seamless.max_staleness=-1" in done.stdout, done.stderr
    assert (here / "mine" / "log.txt").read_text() == "the last run's"
    assert not (checkout / "mine").exists() and str(here / "mine" / "log.txt") in done.stderr


def test_a_folder_that_takes_no_file_is_refused_with_the_way_out(checkout: Path) -> None:
    done = quickstart(checkout, DATA="/sys")  # also for root
    assert done.returncode == 2 and "DATA=/sys: nothing can be written there. Set DATA to a folder" in done.stderr
