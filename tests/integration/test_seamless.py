"""The main job end to end: both layouts, agreement of trainer and rollout, checkpoints, clean exits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from job import AGENT, POOL, SEAMLESS, Job, check_record, run
from shared_memory import check_nothing_left, pieces

pytestmark = pytest.mark.integration
TAGGED: dict[str, Any] = {
    "seamless__resources": "[{count: 1, devices: 1, tags: [train, rollout]}, {count: 1, devices: 1, tags: [rollout]}]",
    "actor_rollout_ref__rollout__checkpoint_engine__backend": "gloo",
    "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
    "trainer__v1__seamless__parameter_sync_step": 2,
}
UNANSWERED = "retries remaining"  # as Ray says it of calls to an actor that ended before it answered them
MEGATRON = "actor_rollout_ref__actor__megatron__"


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(
            {f"{MEGATRON}tensor_model_parallel_size": 2, "actor_rollout_ref__rollout__tensor_model_parallel_size": 2},
            id="tp2",
        ),
        pytest.param({f"{MEGATRON}pipeline_model_parallel_size": 2}, id="pp2"),
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
        seamless__max_staleness=0,
    )
    steps = job.metrics()
    assert steps.keys() == {1, 2, 3, 4}
    for metrics in steps.values():
        assert metrics["training/rollout_logprob_diff_max"] < 2e-2
        assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.9999
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["actor/grad_norm"] > 0
    assert leftovers(job) == []
    check_nothing_left(before)


@pytest.fixture(scope="module")
def disaggregated(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Six steps of an agent on the openai SDK, generating on a device of its own."""
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
        seamless__plot=True,
        actor_rollout_ref__actor__checkpoint__save_contents="[model,optimizer,extra,hf_model]",
    )


def test_disaggregated_trains_within_its_staleness_bound(disaggregated: Job) -> None:
    steps = disaggregated.metrics()
    assert steps.keys() == set(range(7))
    worst = [steps[i]["training/off_policy/trajectory_staleness_worst/max"] for i in range(1, 7)]
    assert max(worst) <= 1
    assert "validation curve" in disaggregated.log()


def test_the_hf_checkpoint_loads_in_plain_transformers(disaggregated: Job, nano: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (folder,) = (disaggregated.folder / "checkpoints" / "global_step_6").rglob("huggingface")
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)("3+4=", return_tensors="pt").input_ids
    with torch.no_grad():
        assert not torch.allclose(trained(ids).logits, original(ids).logits, atol=1e-3)


def test_the_agent_of_a_disaggregated_run_is_on_record(disaggregated: Job) -> None:
    check_record(disaggregated, sessions=6 * 8 * 4)


def test_nothing_is_left_of_a_finished_run(disaggregated: Job) -> None:
    assert leftovers(disaggregated) == [] and UNANSWERED not in disaggregated.log()


def test_a_run_stopped_while_ray_starts_leaves_nothing(nano: Path, tmp_path: Path) -> None:
    job = Job(tmp_path, nano, SEAMLESS, {"trainer.total_training_steps": 1000}, {})
    stopped(job, "Started a local Ray", signal.SIGINT)


def test_a_stopped_run_leaves_whole_checkpoints_and_goes_on_from_the_last(nano: Path, tmp_path: Path) -> None:
    """Multiplexed by tags: one device trains and generates, the other generates. Mini-batches are streamed."""
    endless = {"trainer.total_training_steps": 1000, "trainer.save_freq": 1, "trainer.max_actor_ckpt_to_keep": 2}
    tagged = {key.replace("__", "."): value for key, value in TAGGED.items()}
    stopped(Job(tmp_path, nano, SEAMLESS, endless | tagged, {}), "step:2 ", signal.SIGTERM)
    checkpoints = tmp_path / "checkpoints"
    last = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert last == max(int(folder.name.split("_")[-1]) for folder in checkpoints.glob("global_step_*"))
    (tmp_path / "metrics.jsonl").unlink()
    resumed = run(tmp_path, nano, **TAGGED, trainer__total_training_steps=last + 3, trainer__resume_mode="auto")
    assert leftovers(resumed) == [] and UNANSWERED not in resumed.log()
    assert resumed.metrics().keys() == {last + 1, last + 2, last + 3}
    for metrics in resumed.metrics().values():
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] <= 1
        assert metrics["fleet/serving"] == 2 and metrics["fleet/dead"] == 0
        shares = [metrics[f"seamless/device/{kind}_share"] for kind in ("train", "rollout", "switch", "sync", "idle")]
        assert sum(shares) == pytest.approx(1, abs=0.01)
        assert metrics["seamless/device/train-0/train_share"] > 0 == metrics["seamless/device/rollout-0/train_share"]
    assert (checkpoints / "devices-2.png").stat().st_size > 0, "a resumed run keeps the books of the one before"


def stopped(job: Job, moment: str, number: int) -> None:
    """Stop the run at a moment of its log; nothing of it may be left."""
    job.start().wait_for(moment)
    started = job.descendants()
    assert started
    code = job.stop(number)
    assert code == 130, job.log()[-3000:]
    assert [process for process in started if process.is_running()] == leftovers(job) == []


def leftovers(job: Job) -> list[str]:
    """Processes that mention this run's folder, and what is in its TMPDIR."""
    found = (process.info for process in psutil.process_iter(["pid", "cmdline"]) if process.pid != os.getpid())
    processes = [str(info) for info in found if str(job.folder) in " ".join(info["cmdline"] or [])]
    return processes + sorted(os.listdir(job.temporary))
