"""A run whose adapter alone is trained, staged and committed, and the same run resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.job import run

pytestmark = [pytest.mark.integration, pytest.mark.long]
ACTOR, LORA = "actor_rollout_ref__actor__", "actor_rollout_ref__model__lora__"
OPTIONS = {
    f"{LORA}rank": 8,
    f"{LORA}alpha": 16,
    f"{ACTOR}megatron__vanilla_mbridge": False,
    f"{ACTOR}checkpoint__save_contents": "[model,optimizer,extra,hf_model]",
    "actor_rollout_ref__rollout__load_format": "safetensors",
    "seamless__max_staleness": 0,
    "trainer__save_freq": 3,
}


def test_trainer_and_rollout_agree_on_the_adapter_also_when_resumed(nano: Path, tmp_path: Path) -> None:
    first = run(tmp_path, nano, **OPTIONS, trainer__total_training_steps=3)
    checkpoint = tmp_path / "checkpoints/global_step_3/actor"
    adapter, model = (
        checkpoint / "model/huggingface/adapter/adapter_model.safetensors",
        nano / "model/model.safetensors",
    )
    assert 0 < 4 * adapter.stat().st_size < model.stat().st_size
    for steps, metrics in enumerate(first.metrics().values(), 1):
        assert metrics["training/rollout_logprob_diff_max"] < 2e-2 and metrics["actor/grad_norm"] > 0, steps
    resumed = run(tmp_path, nano, **OPTIONS, trainer__total_training_steps=5).metrics()
    assert resumed.keys() >= {4, 5} and all(resumed[i]["training/rollout_logprob_diff_max"] < 2e-2 for i in (4, 5))
