"""A training run whose planes are killed goes on, and its agents do not notice."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.job import AGENT, Job, check_record

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_training_goes_on_when_its_planes_are_killed(nano: Path, tmp_path: Path) -> None:
    """Two of them share the load; each is killed once, in the midst of it. Their agents have the SDK's own retries."""
    options = AGENT | {"seamless__gateway__shards": 2, "seamless__max_staleness": 0}
    options["trainer__total_training_steps"] = 5
    options["actor_rollout_ref__rollout__agent__default_agent_loop"] = "retrying"
    job = Job(tmp_path, nano, options)
    job.start()
    for step in (1, 3):
        job.wait_for(f"step:{step} ")
        planes(job)[0].send_signal(signal.SIGKILL)
    steps = job.finish().metrics()
    assert steps.keys() == {1, 2, 3, 4, 5}
    for metrics in steps.values():
        assert metrics["training/rollout_logprob_diff_max"] < 2e-2
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["calls/failed"] == metrics["fleet/dead"] == 0
        assert metrics["tokens/generated"] == metrics["tokens/trained"] + metrics["tokens/dropped/too_long"]
    assert not re.search(r"rewarded 0\.0|the group of prompt \S+ failed", job.log()), "an agent noticed"
    check_record(job, sessions=5 * 8 * 4, shards=2)


def planes(job: Job) -> list[psutil.Process]:
    """The planes' processes, oldest first: after the first kill, the one that is left comes before the new one."""
    found = []
    for one in job.descendants():
        with suppress(psutil.NoSuchProcess):
            if any("DataPlane" in part for part in one.cmdline()):
                found.append((one.create_time(), one.pid, one))
    return [one for _, _, one in sorted(found)]
