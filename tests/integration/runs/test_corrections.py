"""Runs whose tokens are old, with each of the corrections of this package."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.job import AGENT, run

pytestmark = [pytest.mark.integration]


def test_by_default_dppo_trains_tokens_of_up_to_four_versions(nano: Path, tmp_path: Path) -> None:
    options = {
        "algorithm__rollout_correction__bypass_mode": True,  # as DPPO sets it; this test's jobs have false
        "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
        "trainer__total_training_steps": 4,
    }
    job = run(tmp_path, nano, **options)
    (line,) = [line for line in job.log().splitlines() if "chosen: seamless.correction.loss=dppo, " in line]
    assert "; seamless.max_staleness=4 " in line
    steps = job.metrics()
    stalest = [metrics["training/off_policy/trajectory_staleness_worst/max"] for metrics in steps.values()]
    assert len(stalest) == 4 and 0 < max(stalest) <= 4
    assert all(metrics["actor/grad_norm"] > 0 for metrics in steps.values())
    for metrics in steps.values():  # which a forward pass before the update has without bypass_mode
        assert 0 < metrics["actor/entropy"] < 8 and metrics["rollout_corr/training_ppl"] > 1
        assert metrics["seamless/agreement/plain/tokens"] > 0
    assert steps[1]["training/rollout_actor_probs_pearson_corr"] > 0.999
    assert steps[1]["training/rollout_logprob_diff_max"] < 2e-2, "all tokens of the first step are of its own weights"


@pytest.mark.parametrize(("loss", "metric"), [("interpolated", "interpolation"), ("m2po", "second_moment")])
def test_old_tokens_are_corrected_in_the_trainers_workers(nano: Path, tmp_path: Path, loss: str, metric: str) -> None:
    options = {
        "actor_rollout_ref__actor__policy_loss__loss_mode": loss,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
        "algorithm__rollout_correction__bypass_mode": True,
        "seamless__max_staleness": 2,
        "seamless__correction__scale_lr": loss == "m2po",
        "trainer__total_training_steps": 2,
    }
    first, second = run(tmp_path, nano, **options).metrics().values()
    assert first["actor/grad_norm"] > 0 and second["actor/grad_norm"] > 0
    assert second[f"actor/{metric}"] > 0
    if loss == "interpolated":
        assert first[f"actor/{metric}"] == 0, "the first step's tokens are of its own weights"
        assert 0.25 < second[f"actor/{metric}"] < 1, "those of the second are one version old: 1, then 1 / 1.5"
    else:
        assert 0 < second["actor/ess_ratio"] < 1 and 0 < second["actor/lr_scale"] < 1


def test_what_verls_correction_masks_is_counted_as_dropped(nano: Path, tmp_path: Path) -> None:
    options = AGENT | {
        "algorithm__rollout_correction__rollout_rs": "token_k1",
        "algorithm__rollout_correction__rollout_rs_threshold": 1.002,
        "trainer__total_training_steps": 2,
    }
    for metrics in (steps := run(tmp_path, nano, **options).metrics()).values():
        masked = metrics["seamless/tokens/masked_as_rejected"]
        assert masked > 0 and 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 1
    total = sum(metrics["seamless/tokens/masked_as_rejected"] for metrics in steps.values())
    dropped = sum(value for name, value in steps[2].items() if name.startswith("tokens/dropped/"))
    assert steps[2]["tokens/dropped/rejected"] == total
    assert steps[2]["tokens/generated"] == steps[2]["tokens/trained"] + dropped


def test_updates_of_which_a_policy_masks_all_tokens_train_nothing_and_end_no_run(nano: Path, tmp_path: Path) -> None:
    """As one step ahead, where only tokens of the newest weights are trained.

    verl's correction needs a token, and so does an estimator that whitens.
    """
    options = {
        "algorithm__adv_estimator": "reinforce_plus_plus_baseline",
        "algorithm__rollout_correction__rollout_is": "token",
        "seamless__tokens__policy": "mask_older_than:0",
        "seamless__ahead": 1,
        "seamless__max_staleness": 2,
        "trainer__total_training_steps": 6,
    }
    job = run(tmp_path, nano, **options)
    steps = job.metrics()
    empty = [step for step, metrics in steps.items() if not metrics["seamless/tokens/trained"]]
    assert len(steps) == 6 and len(empty) > 3, "more than as many as end a run for numbers that are not finite"
    assert all(steps[step]["actor/skipped_updates_sum"] > 0 for step in empty)
    assert "masks all tokens of this update, which trains nothing" in job.log()
