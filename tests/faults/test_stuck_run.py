"""What is stuck in a run is named with its chain of waits, and recovered: an engine that gives no tokens any more, and
an agent that never ends. The run then ends as if nothing had happened."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from support.job import AGENT, POOL, Job
from support.job_ends import leftovers
from support.replicas import engines

from seamless_verl.journal import JournalReader

pytestmark = [pytest.mark.integration, pytest.mark.long]
TRANSITION_S, GROUP_S = 15, 60
TOKEN_S = 2 * TRANSITION_S
OPTIONS = (
    AGENT
    | POOL
    | {
        "trainer__total_training_steps": 2,
        "seamless__max_staleness": 0,
        "seamless__restarts": 3,
        "seamless__watchdog__transition_s": TRANSITION_S,
        "seamless__watchdog__group_s": GROUP_S,
        "actor_rollout_ref__rollout__agent__default_agent_loop": "one_stuck",
    }
)
SESSIONS = 8 * 4  # of a step


def wait_for_sessions(job: Job) -> None:
    """Until the sessions of the first step are open: the engines have their weights then, and no call."""
    journal, deadline = job.folder / "checkpoints" / "trajectories.sqlite", time.monotonic() + 240
    while not journal.exists() or len(list(JournalReader(journal).sessions())) < SESSIONS:
        assert time.monotonic() < deadline and job.process and job.process.poll() is None, job.log()[-4000:]
        time.sleep(0.5)


def test_an_engine_and_an_agent_that_are_stuck_are_named_and_the_run_goes_on(nano: Path, tmp_path: Path) -> None:
    held, taken = tmp_path / "held", tmp_path / "taken"
    held.touch()
    taken.touch()
    job = Job(tmp_path, nano, OPTIONS, {"HELD_WHILE_EXISTS": str(held), "STUCK_IF_TAKEN": str(taken)})
    job.start()
    wait_for_sessions(job)
    (engine,) = engines(job)
    engine.suspend()
    held.unlink()
    job.wait_for("replica replica-0 is given up (stuck)")
    engine.resume()  # so that it can end with its server
    steps = job.finish().metrics()
    log, last = job.log(), steps[2]
    chain = (
        r"the trainer \(waiting for groups, step 1\) waits for group \S+ -> session \S+ -> call \S+ -> replica-0, which"
    )
    (waited,) = re.findall(chain + r" has given none of its calls a token for (\d+) s", log)
    assert TOKEN_S <= int(waited) < 2 * TOKEN_S
    assert re.search(chain + r" .*\n.*--- replica-0\n.* thread ", log), "the stacks of its server are missing"
    assert (last["fleet/given_up/stuck"], last["replicas/lost/stuck"], last["replicas/returned"]) == (1, 1, 1)
    assert (last["watchdog/named/replica"], last["watchdog/recovery/replica"]) == (1, 1)
    assert re.search(
        r"group \S+ -> session \S+, which has had no call of its agent for \d+ s\n.*--- agent loop worker 0\n", log
    )
    assert re.search(
        r"session \d of prompt \S+ failed and is left out: its group has not ended for \d+ s "
        r"\(seamless\.watchdog\.group_s\): ",
        log,
    )
    assert (last["sessions/failed/stuck"], last["sessions/failed"], last["groups/dropped"]) == (1, 1, 0)
    assert last["watchdog/named/group"] >= last["watchdog/recovery/group"] == 1
    for metrics in steps.values():
        dropped = sum(value for name, value in metrics.items() if name.startswith("tokens/dropped/"))
        assert metrics["tokens/generated"] == metrics["tokens/trained"] + dropped > 0
        assert metrics["calls/failed"] == 0
    assert leftovers(job) == []
