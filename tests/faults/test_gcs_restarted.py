"""Ray's GCS dies in the middle of a run and is started again from its storage: the run goes on.

Calls between actors need no GCS. What needs it waits: a data plane's commands store their state there. Ray shows the
driver no more output of the other processes then, so that this test looks at the run's metrics.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from support.cluster import cluster
from support.job import AGENT, Job
from support.job_ends import leftovers

from seamless_verl.platform.forkserver import launcher

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS, AWAY_S = 24, 10.0
FORKS = f'\'"{sys.executable}" -IS "{launcher.__file__}"\''


def test_a_run_goes_on_when_the_gcs_is_started_again(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_storage", "rocksdb")
    monkeypatch.setenv("RAY_gcs_storage_path", str(tmp_path / "gcs"))
    (tmp_path / "gcs").mkdir()
    overrides = AGENT | {
        "actor_rollout_ref__rollout__agent__default_agent_loop": "slow",
        "+ray_kwargs__ray_init__runtime_env__env_vars__VERL_FILE_LOGGER_PATH": tmp_path / "metrics.jsonl",
        "ray_kwargs__ray_init__runtime_env__py_executable": FORKS,
        "trainer__total_training_steps": STEPS,
    }
    with cluster(monkeypatch) as nodes:
        nodes.add("head", devices=1)
        job = Job(tmp_path, nano, overrides, {"RAY_ADDRESS": nodes.address, "VERL_PLATFORM": ""}).start()
        job.wait_for("step:2 ")
        head = nodes.cluster.head_node
        assert head is not None
        head.kill_gcs_server()
        time.sleep(AWAY_S)  # for so long it is away
        away = max(job.metrics())
        head.start_gcs_server()
        steps = job.finish().metrics()
    assert 2 <= away < STEPS - 3
    assert leftovers(job) == []
    assert steps.keys() == set(range(1, STEPS + 1))
    for metrics in steps.values():
        dropped = sum(count for key, count in metrics.items() if key.startswith("tokens/dropped/"))
        assert metrics["tokens/generated"] == metrics["tokens/trained"] + dropped > 0
        assert metrics["calls/failed"] == 0 and metrics["fleet/serving"] + metrics["fleet/paused"] == 1
