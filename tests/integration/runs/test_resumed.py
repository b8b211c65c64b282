"""A run that is stopped at any step resumes from its last checkpoint, which is complete."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from support.job import Job, run
from support.job_ends import WITHOUT_REPLY, leftovers, stopped

from seamless_verl.resources.lending import lending_policy
from seamless_verl.resources.lending.marginal import Marginal
from seamless_verl.runtime.step_metrics import StepMetrics
from seamless_verl.tools.simulator.calibration import read_recording

pytestmark = [pytest.mark.integration, pytest.mark.long]
TAGGED: dict[str, Any] = {
    "seamless__resources": "[{count: 1, devices: 1, tags: [train, rollout]}, {count: 1, devices: 1, tags: [rollout]}]",
    "actor_rollout_ref__rollout__checkpoint_engine__backend": "gloo",
    "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
    "trainer__v1__seamless__parameter_sync_step": 2,
    "seamless__max_staleness": 2,
}


def test_a_stopped_run_leaves_complete_checkpoints_and_resumes_from_the_last(nano: Path, tmp_path: Path) -> None:
    """Multiplexed by tags: one device trains and generates, the other generates. Mini-batches are streamed."""
    endless = {"trainer.total_training_steps": 1000, "trainer.save_freq": 1, "trainer.max_actor_ckpt_to_keep": 2}
    interrupted = Job(tmp_path, nano, TAGGED | endless)
    stopped(interrupted, "step:2 ", signal.SIGTERM)
    assert "step:2 of 1000  reward" in interrupted.log() and " - critic/score/mean:" not in interrupted.log()
    checkpoints = tmp_path / "checkpoints"
    last = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    # The job of these tests does not resume by itself.
    assert f"trainer.resume_mode=auto it resumes from step {last}, in" in interrupted.log().splitlines()[-1]
    assert last == max(int(folder.name.split("_")[-1]) for folder in checkpoints.glob("global_step_*"))
    assert len(list(checkpoints.glob("global_step_*"))) <= 2, "what is not kept leaves no folder"
    (tmp_path / "metrics.jsonl").unlink()
    resumed = run(tmp_path, nano, **TAGGED, trainer__total_training_steps=last + 3, trainer__resume_mode="auto")
    assert leftovers(resumed) == [] and WITHOUT_REPLY not in resumed.log()
    assert resumed.metrics().keys() == {last + 1, last + 2, last + 3}
    steps = StepMetrics.beside(str(checkpoints)).rows()
    assert [row.step for row in steps] == list(range(1, last + 4)), "the file of step metrics goes on"
    assert all(row.number("perf/time_per_step") for row in steps)
    for metrics in resumed.metrics().values():
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] <= 2
        assert metrics["seamless/ahead"] in (1, 2) and 0 <= metrics["seamless/ahead/lost_share"] <= 1
        assert metrics["fleet/serving"] + metrics["fleet/paused"] == 2 and metrics["fleet/dead"] == 0
        shares = [metrics[f"seamless/device/{kind}_share"] for kind in ("train", "rollout", "switch", "sync", "idle")]
        assert sum(shares) == pytest.approx(1, abs=0.01)
        assert metrics["seamless/device/train-0/train_share"] > 0 == metrics["seamless/device/rollout-0/train_share"]
    check_lending(checkpoints, last)
    assert (checkpoints / "devices-2.trace.json").stat().st_size > 0, "a resumed run keeps the files of the earlier one"


def check_lending(checkpoints: Path, last: int) -> None:
    """The policy goes on from the checkpoint, and a simulator's object decides all that it decided."""
    started, resumed = read_recording(checkpoints / "lending.jsonl")
    saved = json.loads((checkpoints / f"global_step_{last}" / "scheduling.json").read_text())["lending"]
    assert started[1] == Marginal().state_dict() != resumed[1] == saved["policy"]
    for name, state, rows in (started, resumed):
        policy = lending_policy(name)
        policy.load_state_dict(state)
        assert rows and all(policy.decide(view) == decision for view, decision in rows)
    assert resumed[2][0][0].now >= saved["now"]
    views = [view for *_, rows in (started, resumed) for view, _ in rows]
    assert {device.device_id for device in views[0].devices} == {"train-0", "rollout-0"}
    for field in ("running", "rate", "slots"):
        assert any(getattr(device, field) for view in views for device in view.devices), field
    for field in ("ready", "finished", "coming"):
        assert any(getattr(view.demand, field) for view in views), field
    moved = [one.carry for *_, rows in (started, resumed) for view, decision in rows for one in decision.values()]
    assert any(moved), "the other device generates throughout, so that calls go on there"
