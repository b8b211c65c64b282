"""A run whose engines put their memory away for training, and agents that ask for replies of a form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from job import AGENT, Job, run

from seamless_verl.trajectory.journal import JournalReader

pytestmark = pytest.mark.integration


def test_calls_within_a_grammar_go_on_after_the_memory_was_released(nano: Path, tmp_path: Path) -> None:
    """As where an engine puts its memory away for training: calls of the next steps are cut at each hand-over."""
    options = AGENT | {
        "actor_rollout_ref__rollout__agent__default_agent_loop": "strict",
        "data__max_response_length": 64,
    }
    options |= {"seamless__handover": "released", "seamless__max_staleness": 2, "trainer__total_training_steps": 4}
    job: Job = run(tmp_path, nano, **options)
    for metrics in job.metrics().values():
        assert metrics["actor/grad_norm"] > 0
        assert metrics["calls/failed"] == metrics["calls/cancelled"] == metrics["fleet/dead"] == 0
    assert not re.search(r"rewarded 0\.0|Error in _run_prompt", job.log()), "an agent noticed"
    assert cut_within_a_grammar(job) > 0


def cut_within_a_grammar(job: Job) -> int:
    """Calls that have tokens of several weight versions, which here only a cut can give them."""
    reader = JournalReader(job.folder / "checkpoints" / "trajectories.sqlite")
    records = [reader.read(session.session_id) for session in reader.sessions()]
    calls = [call for record in records if record is not None for call in record.calls]
    return sum(len({segment.version for segment in call.segments}) > 1 for call in calls)
