"""The openai_agents recipe as a user runs it, for two steps: hand-offs and strict tools over both APIs are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from support.recipes import agents_folder, branches, train

from seamless_verl.journal import StoredSession

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS, PROMPTS, SAMPLES = 2, 4, 4
PATHS = {"responses": "/v1/responses", "chat": "/v1/chat/completions"}


def test_hand_offs_and_strict_tools_are_trained_over_both_apis(tmp_path: Path) -> None:
    run = train("openai_agents", tmp_path, f"trainer.total_training_steps={STEPS}", AGENTS=agents_folder())
    run.check_trained(STEPS, logprob_error=2e-2)
    assert all(now["seamless/agreement/grammar/tokens"] > 0 for now in run.metrics.values())
    rows = parquet.read_table(tmp_path / "data" / "train.parquet").to_pylist()
    agents = {row["prompt"][0]["content"]: row["agent_name"] for row in rows}
    records = run.records()
    assert len(records) == STEPS * PROMPTS * SAMPLES
    asked, handed, calculated = set(), set(), 0
    for record in records:
        assert record.reason == "finished" and not record.refused
        agent = agents[check_triage(record)]
        assert {call.request["path"] for call in record.calls} == {PATHS[agent.removesuffix("_whole")]}
        asked.add(agent)
        if len(record.calls) > 1:
            handed.add(agent)
            calculated += check_hand_off(record)
    assert asked == handed == {"responses", "responses_whole", "chat", "chat_whole"}
    assert calculated > 0


def check_triage(record: StoredSession) -> str:
    """The first call is the triage agent's, and has its hand-off as the one tool; returns the question."""
    request = record.calls[0].request
    system, question = request["messages"]
    assert system["content"] == "Hand sums over to the mathematician."
    assert [tool["function"]["name"] for tool in request["tools"]] == ["transfer_to_mathematician"]
    return str(question["content"])


def check_hand_off(record: StoredSession) -> int:
    """All further calls are the mathematician's, a branch of its own; returns how often its strict tool was used."""
    triage, mathematician = branches(record)
    assert len(triage) == 1 and mathematician == list(record.calls[1:])
    assert [name for name, _ in tool_calls(triage[0])][-1:] == ["transfer_to_mathematician"]
    used = 0
    for call, following in zip(mathematician, [*mathematician[1:], None], strict=True):
        assert call.request["messages"][0]["content"] == "Use the calculator once, then answer."
        for name, arguments in tool_calls(call) if following is not None else []:
            assert name == "calculate" and arguments.keys() == {"left", "operation", "right"}
            sign = {"+": 1, "-": -1}[arguments["operation"]]
            results = [message["content"] for message in following.request["messages"] if message["role"] == "tool"]
            assert str(arguments["left"] + sign * arguments["right"]) in results
            used += 1
    return used


def tool_calls(call: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the calls of tools in the recorded reply."""
    calls = (call.reply or {}).get("message", {}).get("tool_calls") or []
    return [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in calls]
