"""Agent loop workers are killed while agents work: the run goes on, each group is trained once, no token is lost."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.job import AGENT, Job
from support.job_ends import leftovers
from support.killed_runs import AGENTS, free_port, runner, trained_steps
from support.paths import DATA

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS, BATCH, KILLS, WORKERS = 6, 8, 3, 2
OPTIONS = {
    "seamless__max_staleness": 1,
    "actor_rollout_ref__rollout__agent__num_workers": WORKERS,
}
OF_VERL, OF_VERL_STEPS = "verl's own", 30  # a step takes a second or less, and a death is seen within five


def kill_some(job: Job) -> None:
    """One worker at a random moment of each of the first steps."""
    chance = random.Random(time.time())
    for step in range(1, KILLS + 1):
        job.wait_for(f"step:{step} ")
        time.sleep(chance.random())
        chance.choice(workers(job)).kill()
        deadline = time.monotonic() + 60
        while job.log().count("is started again") < step:
            assert time.monotonic() < deadline and job.process and job.process.poll() is None, job.log()[-4000:]
            time.sleep(0.1)


def workers(job: Job) -> list[psutil.Process]:
    return [one for one in job.descendants() if "SeamlessAgentLoopWorker" in " ".join(one.cmdline())]


@pytest.mark.parametrize("agents", [*AGENTS, OF_VERL])
def test_its_prompts_begin_again(nano: Path, tmp_path: Path, agents: str) -> None:
    options: dict[str, Any] = dict(OPTIONS)
    count = STEPS if agents != OF_VERL else OF_VERL_STEPS
    options["trainer__total_training_steps"] = count
    runners, loops, agent = AGENTS.get(agents, (AGENTS["own"][0], "", ""))
    if agents != OF_VERL:
        options |= AGENT | {
            "actor_rollout_ref__rollout__agent__agent_loop_config_path": DATA / loops,
            "actor_rollout_ref__rollout__agent__default_agent_loop": agent,
            "seamless__gateway__port": free_port(),
        }
    with runners(tmp_path):
        job = Job(tmp_path, nano, options).start()
        kill_some(job)
        steps = job.finish().metrics()
    assert steps.keys() == set(range(1, count + 1))
    last = steps[count]
    assert last["loop_workers/restarted"] == KILLS and last["groups/dropped"] == 0
    if agents != OF_VERL:
        trained = trained_steps(tmp_path / "checkpoints" / "trajectories.sqlite")
        assert {len(uids) for uids in trained.values()} == {BATCH} and trained.keys() == steps.keys()
        assert set(Counter(uid for uids in trained.values() for uid in uids).values()) == {1}
        for metrics in steps.values():
            dropped = sum(value for name, value in metrics.items() if name.startswith("tokens/dropped/"))
            assert metrics["tokens/generated"] == metrics["tokens/trained"] + dropped > 0
    if runners is runner:
        assert last["tokens/dropped/session"] == last["tokens/dropped/runner_lost"] == 0, "runners went on"
    assert "Traceback" not in job.log().split("device time: ")[1], "nothing that waits at the end is cut"
    assert leftovers(job) == []


def test_a_worker_that_dies_too_often_ends_the_run(nano: Path, tmp_path: Path) -> None:
    overrides = {
        "trainer.total_training_steps": 50,
        "seamless.restarts": 1,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
    }
    job = Job(tmp_path, nano, overrides).start()
    job.wait_for("step:1 ")
    workers(job)[0].kill()
    job.wait_for("is started again")
    job.wait_for("prompts of it begin again")
    deadline = time.monotonic() + 60
    while not (found := workers(job)) and time.monotonic() < deadline:
        time.sleep(0.1)
    found[0].kill()
    with pytest.raises(AssertionError, match=r"agent loop worker 0 died: .*started again 1 times within 600 s"):
        job.finish()
    assert leftovers(job) == []
