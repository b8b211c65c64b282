"""Mixtures of experts whose trainer would weigh them otherwise than the engines, or could not export them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.config import assert_refused, tiny_run, write_model

from seamless_verl.config import preflight
from seamless_verl.config.checks.experts import EXPERT_TENSOR, PRE_SOFTMAX, VANILLA

QWEN3 = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
MEGATRON = "actor_rollout_ref.actor.megatron"


def job(folder: Path, model: dict[str, Any], *overrides: str) -> Any:
    path = write_model(folder / "mixture", **model)
    return tiny_run(folder, f"actor_rollout_ref.model.path={path}", *overrides)


@pytest.mark.parametrize(
    ("model", "overrides", "found", "needed"),
    [
        (MIXTRAL, (), True, False),
        (MIXTRAL, (f"+{PRE_SOFTMAX}=true",), True, False),
        (QWEN3 | {"norm_topk_prob": False}, (), False, True),
        (QWEN3, (f"+{PRE_SOFTMAX}=true",), True, False),
        (QWEN3 | {"model_type": "qwen2_moe"}, (), True, False),
    ],
)
def test_experts_weigh_what_the_model_says(
    tmp_path: Path, model: dict[str, Any], overrides: tuple[str, ...], found: bool, needed: bool
) -> None:
    way_out = f"Set +{PRE_SOFTMAX}={str(needed).lower()}"
    assert_refused(job(tmp_path, model, *overrides), PRE_SOFTMAX, found, way_out)
    with_it = [one for one in overrides if PRE_SOFTMAX not in one] + [way_out.removeprefix("Set ")]
    assert preflight(job(tmp_path, model, *with_it), devices=1, accelerator=False) == []


def test_a_model_as_mbridge_takes_it_passes(tmp_path: Path) -> None:
    assert preflight(job(tmp_path, QWEN3), devices=1, accelerator=False) == []
    assert preflight(job(tmp_path, MIXTRAL, f"{VANILLA}=False"), devices=1, accelerator=False) == []


@pytest.mark.parametrize(
    ("tensor", "expert", "expert_tensor", "fitting"),
    [(1, 1, 2, 1), (2, 1, 1, 2), (1, 2, 2, 1)],
)
def test_experts_that_mbridge_would_not_gather(
    tmp_path: Path, tensor: int, expert: int, expert_tensor: int, fitting: int
) -> None:
    sizes = (
        "trainer.n_gpus_per_node=4",
        f"{MEGATRON}.tensor_model_parallel_size={tensor}",
        f"{MEGATRON}.expert_model_parallel_size={expert}",
    )
    config = job(tmp_path, QWEN3, *sizes, f"{EXPERT_TENSOR}={expert_tensor}")
    assert_refused(config, EXPERT_TENSOR, expert_tensor, f"Set {EXPERT_TENSOR}={fitting}", devices=4)
    fits = job(tmp_path, QWEN3, *sizes, f"{EXPERT_TENSOR}={fitting}")
    preflight(fits, devices=4, accelerator=False)
