"""A run that stands still ends by itself, and says where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.job import AGENT, Job
from support.job_ends import leftovers

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.serial]


def test_a_run_whose_agents_never_end_is_ended(nano: Path, tmp_path: Path) -> None:
    options = AGENT | {"seamless__watchdog__no_progress_s": 15, "trainer__total_training_steps": 2}
    options["actor_rollout_ref__rollout__agent__default_agent_loop"] = "stuck"
    job = Job(tmp_path, nano, options)
    job.start()
    assert job.process is not None and job.process.wait(300) == 1
    log = job.log()
    assert "The trainer was at: waiting for groups, step 1." in log
    chain = (
        r"What it waits for: the trainer \(waiting for groups, step 1\) waits for group \S+ -> session \S+, which has "
    )
    assert re.search(chain + r"had no call of its agent for \d+ s\.", log)
    assert "--- data plane" in log and "--- replica-0" in log, "it does not say where the others were"
    assert leftovers(job) == []
