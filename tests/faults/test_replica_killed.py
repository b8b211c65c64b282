"""A training run goes on with the replicas that are left, and one that lost its last one says so and ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.job import Job
from support.replicas import engines, servers

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS = {
    "trainer.n_gpus_per_node": 2,
    "trainer.total_training_steps": 5,
    "seamless.max_staleness": 0,
    "seamless.restarts": 0,
}


@pytest.mark.parametrize("whose", ["server", "engine"])
def test_training_goes_on_without_a_replica(nano: Path, tmp_path: Path, whose: str) -> None:
    job = Job(tmp_path, nano, STEPS)
    job.start()
    job.wait_for("step:2 ")
    (servers(job) if whose == "server" else engines(job))[0].send_signal(signal.SIGKILL)
    steps = job.finish().metrics()
    assert steps.keys() == {1, 2, 3, 4, 5}
    assert [steps[step]["fleet/dead"] for step in (1, 5)] == [0, 1]
    for metrics in steps.values():
        assert metrics["training/rollout_logprob_diff_max"] < 2e-2
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["calls/failed"] == 0


def test_a_run_without_replicas_ends_and_says_why(nano: Path, tmp_path: Path) -> None:
    job = Job(tmp_path, nano, STEPS)
    job.start()
    job.wait_for("step:2 ")
    for process in servers(job):
        process.send_signal(signal.SIGKILL)
    with pytest.raises(AssertionError, match="replica-0, replica-1 is lost"):
        job.finish()
