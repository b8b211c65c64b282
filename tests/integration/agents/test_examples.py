"""The functions that docs/agents.md shows are agents as they are written there."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gateway import gateway_harness, user
from support.pages import DOCS, FENCE

from seamless_verl.agents.callable import call_agent, load_agent
from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.outcome import AgentStatus

pytestmark = pytest.mark.integration
BLOCKS = FENCE.findall((DOCS / "agents.md").read_text(encoding="utf-8"))
FUNCTIONS = [block for kind, block in BLOCKS if kind == "python" and "async def run(task, endpoint)" in block]


def test_there_is_one_for_each_sdk() -> None:
    assert [block.splitlines()[0] for block in FUNCTIONS] == ["import openai", "import anthropic"]


@pytest.mark.parametrize("code", FUNCTIONS, ids=["openai", "anthropic"])
@pytest.mark.parametrize(("reply", "reward"), [("2", 1.0), ("3", 0.0)])
async def test_a_function_calls_the_model_and_returns_its_reward(
    code: str, reply: str, reward: float, nano: Path, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(code)
    task = {"prompt": [user("1+1=")], "reward_model": {"ground_truth": "2"}}
    async with gateway_harness(nano) as harness:
        harness.set_replies(reply)
        session = harness.session
        endpoint = Endpoint(session["anthropic_base_url"], session["key"], session["session_id"])
        outcome = await call_agent(load_agent(f"{tmp_path / 'agent.py'}:run"), task, endpoint)
        assert (outcome.status, outcome.reward) == (AgentStatus.FINISHED, reward), outcome.error
        assert "1+1=" in harness.prompt()
