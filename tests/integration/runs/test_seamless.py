"""The main job end to end: both layouts, agreement of trainer and rollout, checkpoints."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.job import AGENT, POOL, Job, check_record, run
from support.job_ends import WITHOUT_REPLY, leftovers, stopped
from support.shared_memory import check_nothing_left, pieces

pytestmark = [pytest.mark.integration, pytest.mark.slowest(1)]
MEGATRON = "actor_rollout_ref__actor__megatron__"


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(
            {f"{MEGATRON}tensor_model_parallel_size": 2, "actor_rollout_ref__rollout__tensor_model_parallel_size": 2},
            id="tp2",
        ),
        pytest.param(
            {f"{MEGATRON}pipeline_model_parallel_size": 2, f"{MEGATRON}vanilla_mbridge": False},
            id="pp2_megatron_bridge",
        ),
    ],
)
def test_trainer_and_rollout_agree_at_every_step(nano: Path, tmp_path: Path, sizes: dict[str, Any]) -> None:
    """On-policy, so each batch is generated right after a weight update with the weights that score it."""
    before = pieces()
    job = run(
        tmp_path,
        nano,
        **sizes,
        trainer__n_gpus_per_node=2,
        trainer__total_training_steps=4,
        trainer__val_before_train=True,
        seamless__max_staleness=0,
    )
    steps = job.metrics()
    assert steps.pop(0) and steps.keys() == {1, 2, 3, 4}
    assert 0 < steps[1]["calls/validation_tokens"] == steps[3]["calls/validation_tokens"] < steps[1]["calls/tokens"]
    for metrics in steps.values():
        assert metrics["training/rollout_logprob_diff_max"] < 2e-2
        assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.9999
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["actor/grad_norm"] > 0
    assert leftovers(job) == []
    check_nothing_left(before)


@pytest.fixture(scope="module")
def disaggregated(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Six steps of an agent on the openai SDK, generating on a device of its own; the trainer has Megatron-Bridge."""
    return run(
        tmp_path_factory.mktemp("disaggregated"),
        nano,
        **POOL,
        **AGENT,
        trainer__total_training_steps=6,
        trainer__save_freq=6,
        trainer__test_freq=3,
        trainer__val_before_train=True,
        seamless__max_staleness=1,
        **{f"{MEGATRON}vanilla_mbridge": False},
        actor_rollout_ref__actor__checkpoint__save_contents="[model,optimizer,extra,hf_model]",
    )


def test_disaggregated_trains_within_its_staleness_bound(disaggregated: Job) -> None:
    steps = disaggregated.metrics()
    assert steps.keys() == set(range(7))
    worst = [steps[i]["training/off_policy/trajectory_staleness_worst/max"] for i in range(1, 7)]
    assert max(worst) <= 1
    assert 0 < steps[6]["calls/validation_tokens"] == steps[6]["tokens/dropped/validation"] < steps[6]["calls/tokens"]
    assert "validation curve" in disaggregated.log()
    assert f"checkpoint: {disaggregated.folder / 'checkpoints' / 'global_step_6'}\n" in disaggregated.log()


def test_a_commit_reports_the_share_for_which_replicas_paused(disaggregated: Job) -> None:
    reported = [metrics.get("seamless/commit/standstill_share") for metrics in disaggregated.metrics().values()]
    shares = [share for share in reported if share is not None]
    assert len(shares) >= 5 and all(0 < share < 1 for share in shares)


def test_the_hf_checkpoint_loads_in_plain_transformers(disaggregated: Job, nano: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (folder,) = (disaggregated.folder / "checkpoints" / "global_step_6").rglob("huggingface")
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)("3+4=", return_tensors="pt").input_ids
    with torch.no_grad():
        assert not torch.allclose(trained(ids).logits, original(ids).logits, atol=1e-3)


def test_the_sessions_of_a_disaggregated_run_are_in_the_journal(disaggregated: Job) -> None:
    check_record(disaggregated, sessions=6 * 8 * 4)


def test_nothing_is_left_of_a_finished_run(disaggregated: Job) -> None:
    assert leftovers(disaggregated) == [] and WITHOUT_REPLY not in disaggregated.log()


def test_a_run_stopped_while_ray_starts_leaves_nothing(nano: Path, tmp_path: Path) -> None:
    job = Job(tmp_path, nano, {"trainer.total_training_steps": 1000})
    stopped(job, "Started a local Ray", signal.SIGINT)
