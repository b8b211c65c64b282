"""A replica that dies in a training run is started again: the run ends with as many replicas as it began, and with
every token accounted for.

With its only replica dead a run waits until it is back, so that nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.job import AGENT, POOL, Job, check_record
from support.paths import DATA
from support.replicas import engines, servers

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS = 8  # so that the kill, which takes a look at all processes, comes long before the end
OPTIONS = AGENT | {
    "trainer__total_training_steps": STEPS,
    "seamless__max_staleness": 0,
    "seamless__restarts": 3,
}


def job_of(folder: Path, data: Path, **options: Any) -> Job:
    return Job(folder, data, OPTIONS | options)


CASES = {
    "own device": ("server", POOL),
    "own device, engine": ("engine", POOL),
    "trainer's device": ("server", {}),
    "trainer's device, released": ("server", {"seamless__handover": "released"}),
}


@pytest.mark.parametrize("whose, layout", CASES.values(), ids=CASES)
def test_a_replica_that_died_comes_back(nano: Path, tmp_path: Path, whose: str, layout: dict[str, Any]) -> None:
    """On a device of its own, and on the trainer's."""
    job = job_of(tmp_path, nano, **layout)
    job.start()
    job.wait_for("step:1 ")
    ending = servers(job) + engines(job)
    (killed,) = servers(job) if whose == "server" else engines(job)
    killed.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(ending, timeout=120)[1], "what is left of it keeps its device's memory"
    steps = job.finish().metrics()
    assert steps.keys() == set(range(1, STEPS + 1))
    last = steps[STEPS]
    assert last["fleet/dead"] == 0 and last["fleet/serving"] + last["fleet/paused"] + last["fleet/released"] == 1
    assert (last["replicas/lost/died"], last["replicas/returned"], last["replicas/abandoned"]) == (1, 1, 0)
    device = "rollout-0" if layout is POOL else "train-0"
    assert last[f"seamless/device/{device}/rollout_share"] > 0, "the ledger does not see the replica again"
    assert re.search(r"replica-0 is lost \(died: .*\); its next start is in 0 s", job.log())
    for metrics in steps.values():
        assert metrics["training/rollout_logprob_diff_max"] < 2e-2
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["calls/failed"] == 0
        assert metrics["tokens/generated"] == metrics["tokens/trained"] + metrics["tokens/dropped/too_long"] > 0
    assert not re.search(r"rewarded 0\.0|the group of prompt \S+ failed", job.log()), "an agent noticed"
    check_record(job, sessions=STEPS * 8 * 4)


def test_the_others_serve_until_a_replica_is_back(nano: Path, tmp_path: Path) -> None:
    """One of two on the trainer's devices; no reward comes before it is back, so that the run does not end earlier."""
    held, last = tmp_path / "held", 9  # some steps may be over before this test has read of the first one
    options = {
        "trainer.n_gpus_per_node": 2,
        "trainer.total_training_steps": last,
        "seamless.max_staleness": 0,
        "seamless.restarts": 1,
        "reward.custom_reward_function.path": DATA / "held_reward.py",
    }
    job = Job(tmp_path, nano, options, {"HELD_WHILE_EXISTS": str(held)}).start()
    job.wait_for("step:1 ")
    held.touch()
    servers(job)[0].send_signal(signal.SIGKILL)
    job.wait_for("is back after")
    held.unlink()
    steps = job.finish().metrics()
    assert steps.keys() == set(range(1, last + 1))
    assert (steps[1]["fleet/dead"], steps[last]["fleet/dead"], steps[last]["replicas/returned"]) == (0, 0, 1)
    assert steps[last]["fleet/serving"] + steps[last]["fleet/paused"] == 2
    assert all(steps[last][f"seamless/device/train-{i}/rollout_share"] > 0 for i in range(2))
    for metrics in steps.values():
        assert metrics["training/rollout_logprob_diff_max"] < 2e-2
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["calls/failed"] == 0


def test_a_server_that_hangs_is_absent_until_it_replies(nano: Path, tmp_path: Path) -> None:
    """One of two on the trainer's devices is stopped, given up, and taken back; the other one serves meanwhile."""
    held, steps_after = tmp_path / "held", 2
    job = job_of(
        tmp_path,
        nano,
        trainer__n_gpus_per_node=2,
        trainer__total_training_steps=12,
        seamless__restarts=0,
        seamless__watchdog__transition_s=10,
        actor_rollout_ref__rollout__agent__default_agent_loop="held",
    )
    job.env["HELD_WHILE_EXISTS"] = str(held)
    job.start()
    job.wait_for("step:1 ")
    stopped = servers(job)[0]
    stopped.suspend()
    job.wait_for("is given up (late")
    job.wait_for(f"step:{last_step(job) + steps_after} ")
    held.touch()  # training waits for groups: it loads what is taken back
    stopped.resume()
    job.wait_for("replies again")
    held.unlink()
    steps = job.finish().metrics()
    last = steps[max(steps)]
    assert steps.keys() == set(range(1, 13))
    assert (last["fleet/given_up/late"], last["fleet/taken_back"], last["fleet/dead"]) == (1, 1, 0)
    assert last["fleet/serving"] + last["fleet/paused"] == 2
    assert all(last[f"seamless/device/train-{i}/rollout_share"] > 0 for i in range(2)), "one does not serve again"
    unanswered = re.findall(r"has not replied to (\w+) for", job.log())
    assert "take_activity" in unanswered, "each step asks for it"
    assert len(unanswered) == len(set(unanswered)), "each question waits once for a server that hangs"
    for metrics in steps.values():
        dropped = sum(value for name, value in metrics.items() if name.startswith("tokens/dropped/"))
        assert metrics["tokens/generated"] == metrics["tokens/trained"] + dropped > 0
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["calls/failed"] == 0


def last_step(job: Job) -> int:
    return max(map(int, re.findall(r"step:(\d+) ", job.log())))
