"""A plan's settings are completed as a run's are."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.config import TINY_CLI, tiny_files

from seamless_verl.cli.main import main
from seamless_verl.platform import detect
from seamless_verl.tools.plan.command import compose_config


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster, with a torch for CPUs."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    for name in ("VERL_PLATFORM", "SEAMLESS_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(detect, "accelerator_present", lambda: False)
    monkeypatch.setattr(detect, "torch_is_for_accelerators", lambda: False)


def test_its_platform_is_the_runs() -> None:
    assert compose_config(None, "seamless_ppo_trainer", []).trainer.device == "cpu"


def test_it_warns_of_nothing_that_a_run_in_a_cluster_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--platform", "cpu", *TINY_CLI, *tiny_files(tmp_path)]) == 0
    assert "ray_kwargs" not in capsys.readouterr().err
