"""Claude Code and Codex as they are, on the gateway over scripted replies: their tools and sub-agents are on record.

The recipes train both on a real engine, whose tiny model calls no tools. Here the replies are written, so that every
kind of call is made: a command, a sub-agent with a command of its own, the last words.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.gateway import GatewayHarness, ScriptedSource, gateway_harness
from support.recipes import agents_folder, conversations

from seamless_verl.agents.command import AgentCommand, run_command
from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.limits import CommandLimits
from seamless_verl.agents.outcome import AgentStatus
from seamless_verl.agents.template import quoted
from seamless_verl.platform.vllm_versions import TAKES_NAMESPACES
from seamless_verl.tiny import make_model

pytestmark = [pytest.mark.integration, pytest.mark.long]
POSITIONS = 65536
CLAUDE = [
    *("claude", "--print", "--permission-mode", "bypassPermissions", "--strict-mcp-config"),
    *("--tools", "Bash,Agent", "--system-prompt", "You mend code.", "--", "{question}"),
]
CODEX = [
    *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
    *("-c", 'model="policy"', "-c", 'model_provider="seamless"', "-c", 'web_search="disabled"'),
    *("-c", 'model_providers.seamless={{name="seamless", env_key="OPENAI_API_KEY", base_url="BASE_URL"}}'),
    *("--", "{question}"),
]


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[GatewayHarness]:
    make_model("nano", 0, tmp_path / "model", POSITIONS)
    async with gateway_harness(tmp_path) as harness:
        yield harness


async def run(harness: GatewayHarness, command: list[str], **env: str) -> str:
    """Runs the command with the session's address and key alone; returns what it printed."""
    session = harness.session
    path = f"{agents_folder()}:{os.environ['PATH']}"
    line = " ".join(word if word == "{question}" else quoted(word) for word in command)
    line = line.replace("BASE_URL", session["base_url"])
    agent = AgentCommand(
        f"{line} </dev/null",  # both add what is on standard input to the prompt
        env={"PATH": path, **env},
        limits=CommandLimits(wall_s=50),
    )
    endpoint = Endpoint(session["anthropic_base_url"], session["key"], session["session_id"])
    outcome = await run_command(agent, {"prompt": "Mend it."}, endpoint)
    assert outcome.status is AgentStatus.FINISHED, (outcome.error, outcome.output)
    return outcome.output


async def called(source: ScriptedSource, times: int) -> None:
    """Returns when so many calls have begun."""
    while len(source.calls) < times:
        source.started.clear()
        await source.started.wait()


def tool_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def recorded_conversations(harness: GatewayHarness) -> list[list[int]]:
    calls = harness.source.calls
    return conversations([(list(call.prompt_ids), harness.recorder.ids(call.call_id)) for call in calls])


def result_of_tool(harness: GatewayHarness, number: int) -> str:
    """The last result of a tool in a call's messages."""
    messages = harness.source.calls[number].request["messages"]
    return str([message["content"] for message in messages if message["role"] == "tool"][-1])


async def test_claude_code_runs_tools_and_a_sub_agent(harness: GatewayHarness) -> None:
    task = {"description": "Look", "prompt": "Look around.", "subagent_type": "general-purpose"}
    harness.set_replies(
        "I look." + tool_call("Bash", command="echo $((40 + 2))", description="Adds"),
        tool_call("Agent", **task, run_in_background=False),
        tool_call("Bash", command="echo $((50 + 3))", description="Adds"),
        "The sub-agent found 53.",
        "All is mended.",
    )
    settings = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}
    assert "All is mended." in await run(harness, CLAUDE, **settings)
    assert recorded_conversations(harness) == [[0, 1, 4], [2, 3]]
    assert result_of_tool(harness, 1) == "42"
    assert result_of_tool(harness, 3) == "53"
    assert "The sub-agent found 53." in result_of_tool(harness, 4)


async def test_codex_runs_tools(harness: GatewayHarness) -> None:
    harness.set_replies("I look." + tool_call("exec_command", cmd="echo $((40 + 2))"), "All is mended.")
    assert "All is mended." in await run(harness, CODEX)
    assert recorded_conversations(harness) == [[0, 1]]
    assert "42" in result_of_tool(harness, 1)


@pytest.mark.skipif(not TAKES_NAMESPACES, reason="vLLM 0.24 takes no namespaces of tools")
async def test_codex_runs_a_sub_agent(harness: GatewayHarness) -> None:
    """Both work at the same time, so they have the same last words, and neither ends before the other has asked."""
    harness.set_replies(tool_call("multi_agent_v1__spawn_agent", message="Look around."), "I looked.")
    harness.source.replies[-1].hold = both = asyncio.Event()
    working = asyncio.create_task(run(harness, CODEX))
    all_called = asyncio.create_task(called(harness.source, 3))
    await asyncio.wait({working, all_called}, return_when=asyncio.FIRST_COMPLETED)
    all_called.cancel()
    both.set()
    await working
    first, *others = recorded_conversations(harness)
    [sub_agent] = others
    assert first[0] == 0 and len(first) > 1
    assert "Look around." in str(harness.source.calls[sub_agent[0]].request["messages"])
    assert "agent_id" in result_of_tool(harness, first[1])
