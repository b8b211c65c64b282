"""Runs whose actor computes what the samples of a prompt share once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.job import run

pytestmark = [pytest.mark.integration]


def test_two_steps_are_trained_with_the_prompts_of_groups_computed_once(nano: Path, tmp_path: Path) -> None:
    job = run(tmp_path, nano, seamless__shared_prefixes="auto", trainer__total_training_steps=2)
    steps = job.metrics()
    assert len(steps) == 2
    for metrics in steps.values():
        assert metrics["actor/grad_norm"] > 0
        assert 0.05 < metrics["seamless/shared/tokens_saved"] < 1
    assert steps[1]["training/rollout_actor_probs_pearson_corr"] > 0.999, "old logprobs, also of shared prompts"
    assert steps[1]["training/rollout_logprob_diff_max"] < 2e-2
    assert "shared_prefixes=auto computes each sequence alone" not in job.log()
