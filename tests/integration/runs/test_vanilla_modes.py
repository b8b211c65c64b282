"""verl's own asynchronous trainers on the CPU platform."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.job import POOL, VERL, run

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.usefixtures("verl_alone")]
SEPARATE: dict[str, Any] = {
    **POOL,
    "trainer__v1__trainer_mode": "separate_async",
    "trainer__v1__separate_async__parameter_sync_step": 2,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
}


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param({"trainer__v1__trainer_mode": "colocate_async"}, id="colocate_async"),
        pytest.param({**SEPARATE, "actor_rollout_ref__hybrid_engine": True}, id="separate_async"),
        pytest.param(
            {**SEPARATE, "trainer__v1__separate_async__hybrid_rollout__enable_switch": True},
            id="separate_async-lending",
        ),
    ],
)
def test_verls_asynchronous_modes_train(nano: Path, tmp_path: Path, mode: dict[str, Any]) -> None:
    job = run(tmp_path, nano, VERL, **mode, trainer__total_training_steps=3)
    assert job.metrics().keys() == {1, 2, 3}
    norms = [metrics["actor/grad_norm"] for metrics in job.metrics().values()]
    assert all(0 < norm < 20 for norm in norms), norms
