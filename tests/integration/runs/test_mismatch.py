"""Trainer and engines are compared in each step, also at the defaults; what makes them differ is named when it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.job import POOL, run

pytestmark = [pytest.mark.integration]
ENGINE, RECORD = "seamless/agreement/engine/", "seamless/agreement/record/mean"
DEFAULTS: dict[str, Any] = {
    "algorithm__rollout_correction__bypass_mode": True,
    "actor_rollout_ref__actor__optim__lr": 1e-4,
    "trainer__total_training_steps": 6,
    "data__max_response_length": 32,
    "actor_rollout_ref__rollout__max_num_seqs": 8,  # groups end one after another: an engine reads of the first of them
}


def test_in_a_run_with_old_tokens_engine_and_trainer_agree_by_the_same_weights(nano: Path, tmp_path: Path) -> None:
    """Samples are up to two versions old, and what is compared is not."""
    job = run(tmp_path, nano, **DEFAULTS, **POOL, seamless__max_staleness=2, seamless__ahead=2)
    compared = {step: metrics for step, metrics in job.metrics().items() if f"{ENGINE}mean" in metrics}
    print({step: {n: v for n, v in m.items() if "agreement" in n} for step, m in compared.items()})  # noqa: T201
    assert len(compared) >= 3, "while training waits for groups, an engine reads a sample of the first one"
    assert max(m["training/off_policy/trajectory_staleness_worst/max"] for m in compared.values()) > 0
    for metrics in compared.values():
        assert metrics[f"{ENGINE}tokens"] > 0 and metrics[f"{ENGINE}mean"] < 0.01
        assert metrics["seamless/agreement/usual"] == 1
    assert "other logprobs than" not in job.log()


def test_an_engine_that_reads_the_model_otherwise_is_noticed_in_the_first_steps(nano: Path, tmp_path: Path) -> None:
    """As when a setting of the model reaches one side alone; its own record agrees with what it reads."""
    override = {"+actor_rollout_ref__rollout__engine_kwargs__vllm__hf_overrides": "{rms_norm_eps: 100.0}"}
    job = run(tmp_path, nano, **DEFAULTS, **POOL, **override, seamless__max_staleness=1)
    compared = {step: metrics for step, metrics in job.metrics().items() if f"{ENGINE}mean" in metrics}
    print({step: {n: v for n, v in m.items() if "agreement" in n} for step, m in compared.items()})  # noqa: T201
    first = compared[min(compared)]
    assert min(compared) <= 2 and first["seamless/agreement/usual"] == 0
    assert all(m["seamless/agreement/record/mean"] < 0.01 for m in compared.values() if RECORD in m)
    assert "Likely no replica agreed yet: compare both models' settings" in job.log()
