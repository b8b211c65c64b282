"""`seamless.handover=auto` follows from the memory plan, and its reason is stated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf
from support.config import tiny_run, write_model
from support.resources import QWEN3_8B

from seamless_verl.config.adopting import adopt_handover
from seamless_verl.config.checks import Settings
from seamless_verl.config.planning import choose_handover, export_line, memory_facts, routes_line, shared_prefixes_line
from seamless_verl.trajectory.routes import Routes

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


def test_the_trainer_waits_for_what_other_ranks_or_experts_take_part_in(tmp_path: Path) -> None:
    def said(*overrides: str) -> str:
        return export_line(Settings.of(tiny_run(tmp_path, *overrides), devices=None, accelerator=False))

    assert said().endswith("the trainer goes on")
    write_model(tmp_path / "moe", num_experts=4)
    model = f"actor_rollout_ref.model.path={tmp_path / 'moe'}"
    assert said(model).endswith("the trainer waits for it (num_experts=4)")


@pytest.mark.parametrize(("experts", "id_bytes"), [(128, 1), (256, 1), (257, 2)])
def test_routes_take_an_id_for_each_layer_and_chosen_expert(tmp_path: Path, experts: int, id_bytes: int) -> None:
    sizes = {"num_experts": experts, "num_experts_per_tok": 8, "num_hidden_layers": 48}
    given = (
        "data.train_batch_size=64",
        f"{ROLLOUT}.n=8",
        "data.max_prompt_length=1000",
        "data.max_response_length=3000",
    )

    def said(*overrides: str) -> str:
        config = tiny_run(tmp_path, *given, *overrides)
        write_model(tmp_path / "model", **sizes)
        return routes_line(Settings.of(config, devices=None, accelerator=False))

    replayed = f"{ROLLOUT}.enable_rollout_routing_replay=True"
    row = 48 * 8 * id_bytes
    rows = Routes.of(np.zeros((1, 48, 8), np.uint8 if id_bytes == 1 else np.uint16))
    assert rows.width == row
    step = f"up to {64 * 8 * 4000 * row / 1e9:.1f} GB for a step's 512 sessions"
    assert said(replayed) == f"routes: {row} bytes a token in journal and rows, {step}"
    assert said() == "" and said(replayed, "trainer.v1.trainer_mode=sync") == ""
    sizes = {}
    assert said(replayed) == "", "a dense model has none"


def test_the_plan_says_whether_updates_compute_the_prompt_of_a_group_once(tmp_path: Path) -> None:
    def said(*overrides: str) -> str:
        config = tiny_run(tmp_path, f"{library}=seamless_verl.platform.engine", *overrides)
        return shared_prefixes_line(Settings.of(config, devices=None, accelerator=False))

    library, alone = "actor_rollout_ref.model.external_lib", "updates: each sequence is computed alone"
    four = f"{ROLLOUT}.n=4"
    assert said(f"{ROLLOUT}.n=1") == said(four, "trainer.v1.trainer_mode=sync") == ""
    assert said(four) == "updates: the prompt of a group's 4 sequences is computed once (seamless.shared_prefixes=auto)"
    assert said(four, "seamless.shared_prefixes=never") == f"{alone} (seamless.shared_prefixes=never)"
    assert said(four, f"{library}=null") == f"{alone} (Transformer Engine's layers)"
    assert said(four, "actor_rollout_ref.model.lora.rank=8") == f"{alone} (adapters)"
    write_model(tmp_path / "moe", num_experts=4)
    assert said(four, f"actor_rollout_ref.model.path={tmp_path / 'moe'}") == f"{alone} (experts)"
