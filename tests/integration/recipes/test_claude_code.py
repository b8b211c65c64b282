"""The claude_code recipe as a user runs it, for two steps: Claude Code as it is, trained by its base URL alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.recipes import agents_folder, branches, train

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS, PROMPTS, SAMPLES = 2, 2, 2


def test_claude_code_is_trained(tmp_path: Path) -> None:
    run = train("claude_code", tmp_path, f"trainer.total_training_steps={STEPS}", AGENTS=agents_folder())
    run.check_trained(STEPS, logprob_error=2e-2)
    records = run.records()
    assert len(records) == STEPS * PROMPTS * SAMPLES
    for record in records:
        assert record.reason == "finished"
        [conversation] = branches(record)  # whatever Claude Code adds, each call begins with the tokens before it
        assert conversation == list(record.calls)
        for call in conversation:
            request = call.request
            assert request["path"] == "/v1/messages"
            assert {"Bash", "Edit", "Read"} <= {tool["function"]["name"] for tool in request["tools"]}
            assert "You mend a repository." in str(request["messages"][0]["content"])
            assert len(call.prompt_ids) > 5000
    again = [record for record in records if len(record.calls) > 1]
    assert again, "a reply that is cut, or tests that fail, make Claude Code call again"
    assert run.metrics[STEPS]["gateway/requests_refused"] == sum(len(record.refused) for record in records)
