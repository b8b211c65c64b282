"""The lines of a plan say what the workers will decide of weights, routes and updates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.config import tiny_run, write_model

from seamless_verl.config.checks import Settings
from seamless_verl.tools.plan.run_lines import export_line, routes_line, shared_prefixes_line
from seamless_verl.trajectory.routes import Routes

ROLLOUT = "actor_rollout_ref.rollout"


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
