"""Our config is verl's, with one node added, one trainer mode added and two defaults chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf
from support.config import TINY, compose_ours, compose_verl, refused, tiny_files

from seamless_verl.config import SeamlessConfig, preflight, register_search_path

SEAMLESS_KEYS = {
    *("layout", "max_staleness", "cpu", "gateway", "plot"),
    *("resources", "wait_for_machines_s", "device_memory_gb", "host_memory_gb"),
}
MIXED = (
    "data.train_batch_size=64",
    "actor@actor_rollout_ref.actor=dp_actor",
    "+new.key=1",
    "~critic",
    "++trainer.logger=[console]",
)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((), ("model_engine=megatron",)),
        (("model_engine=dp",), ("model_engine=dp",)),
        (MIXED, ("model_engine=megatron", *MIXED)),
    ],
)
def test_vanilla_config_is_verls_own(ours: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    """Law 7: in one of verl's modes nothing but the added nodes differs, by interpolation or by value."""
    mine, verls = compose_ours("trainer.v1.trainer_mode=sync", *ours), compose_verl(*theirs)
    for resolve in (False, True):
        tree = OmegaConf.to_container(mine, resolve=resolve)
        assert isinstance(tree, dict)
        assert set(tree.pop("seamless")) == {field.name for field in fields(SeamlessConfig)}
        assert set(tree["trainer"]["v1"].pop("seamless")) == {"parameter_sync_step"}
        assert tree == OmegaConf.to_container(verls, resolve=resolve)


def test_a_whole_config_passes_and_is_refused(tmp_path: Path) -> None:
    config = compose_ours(*TINY, *tiny_files(tmp_path))
    assert preflight(config, devices=1, accelerator=False) == []
    config.data.train_batch_size = 10
    assert [problem.key for problem in refused(config)] == ["data.train_batch_size"]


def test_our_defaults() -> None:
    config = compose_ours("seamless.max_staleness=3")
    assert config.model_engine == config.actor_rollout_ref.actor.strategy == "megatron"
    assert config.trainer.v1.trainer_mode == "seamless"
    assert config.trainer.v1.seamless == {"parameter_sync_step": 1}
    assert config.seamless.max_staleness == 3


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `hydra.main` on a command line in this process and returns what it printed."""
    register_search_path()

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["main", *arguments])
        decorate = hydra.main("pkg://seamless_verl.config", "seamless_ppo_trainer", version_base=None)
        # `--help` ends the process.
        with suppress(SystemExit):
            decorate(lambda config: sys.stdout.write(f"ran {config.data.train_batch_size}"))()
        return capsys.readouterr().out

    return run


def test_a_users_own_config_builds_on_ours(tmp_path: Path, run_main: Callable[..., str]) -> None:
    (tmp_path / "task.yaml").write_text("defaults: [seamless_ppo_trainer, _self_]\ndata: {train_batch_size: 24}\n")
    quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none")
    out = tmp_path / "out"
    said = run_main("--config-path", str(tmp_path), "--config-name", "task", f"hydra.run.dir={out}", *quiet)
    assert said == "ran 24"
    assert (out / ".hydra" / "overrides.yaml").is_file()


def test_hydra_information(run_main: Callable[..., str]) -> None:
    job = run_main("--cfg", "job", "model_engine=dp", "trainer.v1.trainer_mode=sync")
    assert "max_staleness: null" in job and "strategy: fsdp" in job and "ran " not in job
    assert "model_engine: dp, megatron, torchtitan, veomni" in run_main("--help")
