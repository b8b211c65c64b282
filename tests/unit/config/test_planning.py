"""`seamless.handover=auto` follows from the memory plan, and its reason is stated."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from support.config import tiny_run, write_model
from support.resources import QWEN3_8B

from seamless_verl.config.adopting import adopt_handover
from seamless_verl.config.checks import Settings
from seamless_verl.config.planning import choose_handover, memory_facts

ROLLOUT = "actor_rollout_ref.rollout"
ACCELERATOR = "trainer.device=cuda"


def run_of_8b(folder: Path, *overrides: str) -> DictConfig:
    """On one accelerator of 600 GB."""
    config = tiny_run(folder, ACCELERATOR, "seamless.device_memory_gb=600", *overrides)
    write_model(folder / "model", **QWEN3_8B)
    return config


def chosen(config: DictConfig, *, accelerator: bool = True) -> str:
    return str(choose_handover(Settings.of(config, devices=None, accelerator=accelerator)))


def test_both_sides_stay_where_they_fit(tmp_path: Path) -> None:
    words = chosen(run_of_8b(tmp_path, f"{ROLLOUT}.gpu_memory_utilization=0.3"))
    assert words.startswith("seamless.handover=resident: both fit, trainer and engine together need up to ")
    assert words.endswith("of 600.0 GB")


def test_else_the_engine_is_released_where_its_cache_is_freed(tmp_path: Path) -> None:
    words = chosen(run_of_8b(tmp_path, f"{ROLLOUT}.gpu_memory_utilization=0.6"))
    assert words.startswith("seamless.handover=released: trainer and engine together need up to ")
    assert words.endswith(f"of which 90% may be planned, and {ROLLOUT}.free_cache_engine=True")
    for key in ("free_cache_engine", "enable_sleep_mode"):
        kept = chosen(run_of_8b(tmp_path, f"{ROLLOUT}.gpu_memory_utilization=0.6", f"{ROLLOUT}.{key}=False"))
        assert kept.startswith("seamless.handover=resident: nothing is released")


@pytest.mark.parametrize("memory", ["null", "300"])
def test_memory_that_is_not_known_is_released(tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    config = run_of_8b(tmp_path, f"seamless.device_memory_gb={memory}")
    if memory == "300":
        OmegaConf.update(config, "actor_rollout_ref.model.path", "hdfs://models/of/a/cluster")
        assert "the trainer's memory is not known" in chosen(config)
    else:
        assert "seamless.device_memory_gb states it" in chosen(config)
    assert chosen(config).startswith("seamless.handover=released")


def test_the_memory_of_a_model_that_is_not_here_is_not_known(tmp_path: Path) -> None:
    """A run for a cluster may be checked where its model is not."""
    config = run_of_8b(tmp_path, "actor_rollout_ref.model.path=/no/such/model")
    assert chosen(config).startswith("seamless.handover=released: the trainer's memory is not known")
    assert "the trainer's memory is not known" in str(adopt_handover(config))


def test_the_cpu_platform_and_a_stated_handover(tmp_path: Path) -> None:
    assert chosen(run_of_8b(tmp_path), accelerator=False).startswith("seamless.handover=resident")
    assert chosen(run_of_8b(tmp_path, "seamless.handover=released")) == "seamless.handover=released: as set"


def test_every_process_of_a_run_reads_what_was_chosen(tmp_path: Path) -> None:
    config = run_of_8b(tmp_path, f"{ROLLOUT}.gpu_memory_utilization=0.6")
    words = adopt_handover(config)
    assert words is not None and words.startswith("seamless.handover=released")
    assert config.seamless.handover == "released" and adopt_handover(config) is None
    assert adopt_handover(run_of_8b(tmp_path, "trainer.v1.trainer_mode=sync")) is None


@pytest.mark.parametrize(("overrides", "released"), [((), True), ((f"{ROLLOUT}.free_cache_engine=False",), False)])
def test_verls_own_modes_go_by_its_setting(tmp_path: Path, overrides: tuple[str, ...], released: bool) -> None:
    config = run_of_8b(tmp_path, "trainer.v1.trainer_mode=sync", *overrides)
    facts = memory_facts(Settings.of(config, devices=None, accelerator=True))
    assert facts is not None and facts.engine.released is released
    assert not facts.staged and not facts.engine.cache_in_switch
