"""The codex recipe as a user runs it, for two steps: Codex as it is, trained by its base URL alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.recipes import agents_folder, branches, train

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS, PROMPTS, SAMPLES = 2, 2, 2


def test_codex_is_trained(tmp_path: Path) -> None:
    run = train("codex", tmp_path, f"trainer.total_training_steps={STEPS}", AGENTS=agents_folder())
    run.check_trained(STEPS, logprob_error=2e-2)
    records = run.records()
    assert len(records) == STEPS * PROMPTS * SAMPLES
    for record in records:
        assert record.reason == "finished"
        [conversation] = branches(record)
        first, *later = conversation
        assert later and not record.refused, "failing tests go back to Codex, which resumes in another process"
        assert "FAIL" in str(later[0].request["messages"][-1]["content"])
        for call in conversation:
            request = call.request
            assert request["path"] == "/v1/responses"
            assert "exec_command" in {tool["function"]["name"] for tool in request["tools"]}
            assert "You mend a repository." in str(request["messages"][0]["content"])
        assert len(first.prompt_ids) > 4000
