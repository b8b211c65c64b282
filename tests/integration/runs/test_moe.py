"""A mixture of experts, trained by the main job with expert parallelism, its engines loading what was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.job import run

pytestmark = [pytest.mark.integration, pytest.mark.long]
MEGATRON = "actor_rollout_ref__actor__megatron__"


def test_a_mixture_trains_with_its_experts_on_two_devices(moe: Path, tmp_path: Path) -> None:
    """Each batch is generated right after a weight update, with the weights that score it. The probabilities agree but
    for the tokens to which bf16 gives another expert, about one in fifty (tests/integration/platform)."""
    job = run(
        tmp_path,
        moe,
        **{
            f"{MEGATRON}expert_model_parallel_size": 2,
            f"+{MEGATRON}override_transformer_config__moe_router_dtype": "fp32",
        },
        trainer__n_gpus_per_node=2,
        trainer__total_training_steps=5,
        trainer__test_freq=5,
        seamless__max_staleness=0,
    )
    steps = job.metrics()
    correlations = [steps[i]["training/rollout_actor_probs_pearson_corr"] for i in range(1, 6)]
    differences = [steps[i]["training/rollout_probs_diff_mean"] for i in range(1, 6)]
    print(f"\ncorrelation {correlations}, mean difference of probabilities {differences}")  # noqa: T201
    assert min(correlations) > 0.99
    assert all(steps[i]["actor/grad_norm"] > 0 for i in range(1, 6))
