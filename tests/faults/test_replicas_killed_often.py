"""A random replica of two is killed again and again: the run ends with as many as it began, and no token is lost.

SEAMLESS_REPLICA_KILLS is how often, 2 by default, and SEAMLESS_KILL_EVERY_S the seconds between two kills, 20 by
default; from four kills on more than 40, since a replica that does not serve for half a minute is abandoned at last.
How a step's speed with both replicas compares with that before the first kill is printed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest
from support.job import AGENT, Job
from support.job_ends import leftovers
from support.replicas import servers

from seamless_verl.runtime.step_metrics import response_tokens
from seamless_verl.trajectory.account import DropReason

KILLS = int(os.environ.get("SEAMLESS_REPLICA_KILLS", "2"))
EVERY_S = float(os.environ.get("SEAMLESS_KILL_EVERY_S", "20"))
pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(600 + 2 * KILLS * EVERY_S)]
OPTIONS = AGENT | {
    "actor_rollout_ref__rollout__agent__default_agent_loop": "retrying",
    "trainer__n_gpus_per_node": 2,
    "trainer__total_training_steps": 100_000,
    "trainer__total_epochs": 100_000,
}


def test_the_run_ends_with_as_many_replicas_as_it_began(nano: Path, tmp_path: Path) -> None:
    chance = random.Random(time.time())
    with running(tmp_path, nano) as job:
        due = time.monotonic()
        for number in range(1, KILLS + 1):
            due += EVERY_S
            time.sleep(max(0.0, due - time.monotonic()))
            chance.choice(servers(job)).send_signal(signal.SIGKILL)
            wait_for_returns(job, number)
        after = max(map(int, re.findall(r"step:(\d+) ", job.log()))) + 2  # one of them begins with all replicas
        job.wait_for(f"step:{after} ")
        assert job.stop(signal.SIGTERM) == 130 and leftovers(job) == []
    steps = job.metrics()
    assert steps.keys() == set(range(1, max(steps) + 1))
    last = steps[max(steps)]
    assert last["fleet/dead"] == 0 and last["fleet/serving"] + last["fleet/paused"] + last["fleet/released"] == 2
    assert (last["replicas/lost/died"], last["replicas/returned"], last["replicas/abandoned"]) == (KILLS, KILLS, 0)
    for metrics in steps.values():
        dropped = sum(metrics[f"tokens/dropped/{reason}"] for reason in DropReason)
        assert metrics["calls/failed"] == 0 and metrics["tokens/generated"] == metrics["tokens/trained"] + dropped
    assert not re.search(r"rewarded 0\.0|the group of prompt \S+ failed", job.log()), "an agent noticed"
    away = [float(seconds) for seconds in re.findall(r"is back after ([\d.]+) s", job.log())]
    before, later = whole_rates(steps)
    sys.stdout.write(
        f"\n{KILLS} kills in {len(steps)} steps; back after {median(away):.1f} s, {max(away):.1f} at most; tokens/s in "
        f"{len(before)} steps before them {median(before or [0]):.0f}, in {len(later)} later ones with both replicas "
        f"{median(later or [0]):.0f}\n"
    )


@contextmanager
def running(folder: Path, data: Path) -> Iterator[Job]:
    job = Job(folder, data, OPTIONS).start()
    try:
        job.wait_for("step:1 ")
        yield job
    finally:
        if job.process is not None and job.process.poll() is None:
            job.stop(signal.SIGTERM)


def wait_for_returns(job: Job, number: int) -> None:
    deadline = time.monotonic() + 180
    while len(re.findall("is back after", job.log())) < number:
        assert time.monotonic() < deadline and job.process and job.process.poll() is None, job.log()[-4000:]
        time.sleep(0.1)


def whole_rates(steps: Mapping[int, Mapping[str, float]]) -> tuple[list[float], list[float]]:
    """Response tokens a second of the steps that began and ended with both replicas, before the first kill and later.

    The first three warm up.
    """

    def losses(step: int) -> tuple[float, ...]:
        return tuple(steps[step][name] for name in ("replicas/lost/died", "replicas/returned", "fleet/dead"))

    calm = [step for step in steps if step > 3 and losses(step) == losses(step - 1) and steps[step]["fleet/dead"] == 0]
    rates = {step: response_tokens(steps[step]) / steps[step]["perf/time_per_step"] for step in calm}
    killed = {step for step in calm if steps[step]["replicas/lost/died"]}
    return [rates[step] for step in calm if step not in killed], [rates[step] for step in calm if step in killed]
