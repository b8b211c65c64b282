"""An agent on the openai SDK is trained through the gateway, in both layouts, with every token on record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from job import SUPPORT, Job, run

from seamless_verl.trajectory.journal import JournalReader

pytestmark = pytest.mark.integration
AGENT: dict[str, Any] = {
    "seamless__gateway__enabled": True,
    "actor_rollout_ref__rollout__agent__agent_loop_config_path": SUPPORT / "openai_loops.yaml",
    "actor_rollout_ref__rollout__agent__default_agent_loop": "openai",
    "data__max_response_length": 32,
    "data__max_prompt_length": 64,
}
POOL: dict[str, Any] = {
    "actor_rollout_ref__rollout__nnodes": 1,
    "actor_rollout_ref__rollout__n_gpus_per_node": 1,
    "actor_rollout_ref__rollout__checkpoint_engine__backend": "gloo",
}


@pytest.mark.parametrize(
    ("layout", "staleness"), [pytest.param({}, 0, id="colocated"), pytest.param(POOL, 1, id="disaggregated")]
)
def test_an_openai_agent_is_trained(nano: Path, tmp_path: Path, layout: dict[str, Any], staleness: int) -> None:
    bound = {"seamless__max_staleness": staleness}
    job: Job = run(tmp_path, nano, **AGENT, **layout, **bound, trainer__total_training_steps=4)
    steps = job.metrics()
    assert steps.keys() == {1, 2, 3, 4}
    for metrics in steps.values():
        assert metrics["actor/grad_norm"] > 0
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] <= staleness
        assert staleness or metrics["training/rollout_logprob_diff_max"] < 2e-2
        assert metrics["calls/failed"] == metrics["calls/cancelled"] == 0
    reader = JournalReader(tmp_path / "checkpoints" / "trajectories.sqlite")
    sessions = reader.sessions()
    assert len(sessions) >= 4 * 8 * 4
    closed = [session for session in sessions if session.reason == "finished"]
    assert len(closed) >= 4 * 8 * 4 and {session.calls for session in closed} == {2}
    first, second = reader.read(closed[0].session_id).calls
    whole = first.prompt_ids + first.turn().generated_ids
    assert second.prompt_ids[: len(whole)] == whole, "the second turn builds on the very tokens of the first"
