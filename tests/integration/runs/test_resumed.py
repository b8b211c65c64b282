"""A run that is stopped at any step resumes from its last checkpoint, which is complete."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from support.job import SEAMLESS, Job, run
from support.job_ends import WITHOUT_REPLY, leftovers, stopped

pytestmark = [pytest.mark.integration, pytest.mark.long]
TAGGED: dict[str, Any] = {
    "seamless__resources": "[{count: 1, devices: 1, tags: [train, rollout]}, {count: 1, devices: 1, tags: [rollout]}]",
    "actor_rollout_ref__rollout__checkpoint_engine__backend": "gloo",
    "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
    "trainer__v1__seamless__parameter_sync_step": 2,
}


def test_a_stopped_run_leaves_complete_checkpoints_and_resumes_from_the_last(nano: Path, tmp_path: Path) -> None:
    """Multiplexed by tags: one device trains and generates, the other generates. Mini-batches are streamed."""
    endless = {"trainer.total_training_steps": 1000, "trainer.save_freq": 1, "trainer.max_actor_ckpt_to_keep": 2}
    tagged = {key.replace("__", "."): value for key, value in TAGGED.items()}
    stopped(Job(tmp_path, nano, SEAMLESS, endless | tagged, {}), "step:2 ", signal.SIGTERM)
    checkpoints = tmp_path / "checkpoints"
    last = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert last == max(int(folder.name.split("_")[-1]) for folder in checkpoints.glob("global_step_*"))
    (tmp_path / "metrics.jsonl").unlink()
    resumed = run(tmp_path, nano, **TAGGED, trainer__total_training_steps=last + 3, trainer__resume_mode="auto")
    assert leftovers(resumed) == [] and WITHOUT_REPLY not in resumed.log()
    assert resumed.metrics().keys() == {last + 1, last + 2, last + 3}
    for metrics in resumed.metrics().values():
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] <= 1
        assert metrics["fleet/serving"] == 2 and metrics["fleet/dead"] == 0
        shares = [metrics[f"seamless/device/{kind}_share"] for kind in ("train", "rollout", "switch", "sync", "idle")]
        assert sum(shares) == pytest.approx(1, abs=0.01)
        assert metrics["seamless/device/train-0/train_share"] > 0 == metrics["seamless/device/rollout-0/train_share"]
    assert (checkpoints / "devices-2.png").stat().st_size > 0, "a resumed run keeps the files of the earlier one"
