"""A run whose engines release their memory for training, with agents that request replies of a grammar."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.job import AGENT, Job, run

from seamless_verl.journal import JournalReader

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_calls_within_a_grammar_continue_after_the_memory_was_released(nano: Path, tmp_path: Path) -> None:
    """Calls of the next steps are cut at each hand-over, when the engine releases its memory."""
    options = AGENT | {
        "actor_rollout_ref__rollout__agent__default_agent_loop": "strict",
        "data__max_response_length": 64,
    }
    options |= {"seamless__handover": "released", "seamless__max_staleness": 2, "trainer__total_training_steps": 4}
    job: Job = run(tmp_path, nano, **options)
    for metrics in job.metrics().values():
        assert metrics["actor/grad_norm"] > 0
        assert metrics["calls/failed"] == metrics["calls/cancelled"] == metrics["fleet/dead"] == 0
    assert not re.search(r"rewarded 0\.0|the group of prompt \S+ failed", job.log()), "an agent noticed"
    assert cut_within_a_grammar(job) > 0
    first = job.metrics()[1]  # the only step of which it is certain that the trainer has the tokens' version
    assert first["seamless/agreement/grammar/tokens"] > 0 and first["seamless/agreement/grammar/max"] < 2e-2


def cut_within_a_grammar(job: Job) -> int:
    """The number of calls with tokens of several weight versions, which only a cut causes here."""
    reader = JournalReader(job.folder / "checkpoints" / "trajectories.sqlite")
    records = [reader.read(session.session_id) for session in reader.sessions()]
    calls = [call for record in records if record is not None for call in record.calls]
    return sum(len({segment.version for segment in call.segments}) > 1 for call in calls)
