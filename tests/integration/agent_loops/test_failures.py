"""What is trained of agents that fail: by agent loops, a worker and a data plane as of a run, over a stub engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from support.agent_loops import make_loop
from support.agents import python
from support.local_plane import Handle
from support.runner_plane import runner_plane
from support.scripted_loops import Put, put, worker

from seamless_verl.agent_loops import loops
from seamless_verl.agent_loops.group import GROUP, SessionGroup, warned
from seamless_verl.agent_loops.loops import AgentFailedError
from seamless_verl.agent_loops.queue_writer import QueueWriter
from seamless_verl.agent_loops.worker import SeamlessAgentLoopWorker
from seamless_verl.agents.failures import ToolFailedError
from seamless_verl.errors import CallRefusedError
from seamless_verl.tools.bench.stub_engine import StubEngine
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.session import Closed

pytestmark = pytest.mark.integration
__all__ = ["put"]
CALLABLE = {"name": "fleet", "_target_": "seamless_verl.agent_loops.loops.CallableAgentLoop", "agent": "operator:add"}
COMMAND = {"name": "fleet", "_target_": "seamless_verl.agent_loops.loops.CommandAgentLoop"}
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
SESSIONS = 6
ASKS = "import json, os, sys, urllib.request as u\n" + (
    "asked = {'model': 'policy', 'messages': [{'role': 'user', 'content': 'hi'}], 'max_tokens': 3}\n"
    "body = json.dumps(asked).encode()\n"
    "head = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'content-type': 'application/json'}\n"
    "u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, head)).read()\n"
)


async def ask(endpoint: Any) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{endpoint.base_url}/v1", api_key=endpoint.session_key, max_retries=0
    ) as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}], max_tokens=3)


class Fleet:
    """A function whose every second session is right, and whose sandbox fails in every third that begins."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.begun = error, 0

    async def __call__(self, task: Any, endpoint: Any) -> float:
        number, self.begun = self.begun, self.begun + 1
        await ask(endpoint)
        if self.error is not None and number % 3 == 0:
            raise self.error
        return float(number % 2)


async def mean_reward(
    loop: Any, nano: Path, journal: Path, put: Put, monkeypatch: pytest.MonkeyPatch, prompts: int = 2
) -> tuple[float, dict[str, float]]:
    """Of the rows of so many prompts, and the metrics of their data plane."""
    warned.clear()
    async with asyncio.timeout(300), runner_plane(nano, journal) as plane:
        monkeypatch.setattr(loops, "plane_for", lambda config, name: handle)
        made, handle = worker(SeamlessAgentLoopWorker, put, SESSIONS), Handle(plane)
        made.plane, made.loops = handle, {"fleet": lambda **_: loop}
        columns = {"agent_name": "fleet", "global_steps": 1, "data_source": "a"}
        for number in range(prompts):
            message = np.array([{"role": "user", "content": "hi"}], dtype=object)
            prompt = {"uid": f"u{number}", "raw_prompt": message, **columns}
            where = {"step": 1, "sample_index": number, "rollout_n": 0, "validate": False}
            await made._run_prompt(prompt, SAMPLING, trajectory=where)
        rows = put.rows().values()
        metrics = await plane.metrics()
    scores = [float(columns["rm_scores"].sum()) for _, columns in rows]
    return sum(scores) / len(scores), metrics | {"rows": len(scores)}


@pytest.mark.parametrize(
    ("error", "settings", "mean", "rows"),
    [
        (None, {}, 1 / 2, 12),
        (ToolFailedError("the sandbox is gone"), {}, 1 / 2, 8),
        (ToolFailedError("the sandbox is gone"), {"failure_reward": 0.0}, 1 / 2, 8),
        (RuntimeError("of the agent's own"), {}, 1 / 2, 8),
        (RuntimeError("of the agent's own"), {"failure_reward": 0.0}, 1 / 3, 12),
    ],
)
async def test_sandboxes_that_fail_do_not_change_the_mean_reward(
    nano: Path,
    tmp_path: Path,
    put: Put,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
    settings: dict[str, Any],
    mean: float,
    rows: int,
) -> None:
    """A crash that is taken for an answer sinks it, as it does where that is asked for."""
    loop = make_loop(CALLABLE | settings)
    loop.agent = Fleet(error)
    found, metrics = await mean_reward(loop, nano, tmp_path / "journal.sqlite", put, monkeypatch)
    assert found == pytest.approx(mean) and metrics["rows"] == rows
    assert metrics["sessions/ended"] == 12 and metrics["groups/dropped"] == 0
    kind = {ToolFailedError: "tool_failed", RuntimeError: "failed"}.get(type(error), "")
    assert metrics["sessions/failed"] == (4 if error else 0) == metrics.get(f"sessions/failed/{kind}", 0)
    tool, own = (metrics[f"tokens/dropped/{reason}"] for reason in (DropReason.TOOL_FAILED, DropReason.AGENT_FAILED))
    assert (tool > 0, own > 0) == (kind == "tool_failed", kind == "failed" and not settings)
    assert metrics["tokens/generated"] == metrics["tokens/trained"] + tool + own
    assert len([line for line in caplog.messages if "failed and is" in line]) == bool(error), "one line for a kind"


@pytest.mark.parametrize(("code", "kind"), [(75, "tool_failed"), (125, "tool_failed"), (3, "failed")])
async def test_a_command_says_by_its_exit_code_that_its_sandbox_failed(
    nano: Path, tmp_path: Path, put: Put, monkeypatch: pytest.MonkeyPatch, code: int, kind: str
) -> None:
    taken = str(tmp_path / "taken")
    fails = f"try: os.mkdir({taken!r})\nexcept FileExistsError: open('reward.json', 'w').write('{{\"reward\": 1}}')\n"
    code_of_one = f"{ASKS}{fails}else: sys.exit({code})\n"
    loop = make_loop(COMMAND | {"command": python(code_of_one), "failure_reward": 0.0})
    found, metrics = await mean_reward(loop, nano, tmp_path / "journal.sqlite", put, monkeypatch, prompts=1)
    assert found == pytest.approx(1.0 if kind == "tool_failed" else 5 / 6)
    assert metrics[f"sessions/failed/{kind}"] == metrics["sessions/failed"] == 1


async def run(loop: Any, plane: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    group = SessionGroup(QueueWriter(), "u")
    GROUP.set(group)
    monkeypatch.setattr(loops, "plane_for", lambda config, name: Handle(plane))
    prompt = np.array([{"role": "user", "content": "2+2="}], dtype=object)
    return group, await loop.run(SAMPLING, uid="u", session_id=0, raw_prompt=prompt)


async def test_an_agent_that_fails_at_its_sessions_limit_is_scored(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises then: the gateway has refused its last call."""

    async def agent(task: Any, endpoint: Any) -> float:
        await ask(endpoint)
        try:
            await ask(endpoint)
        except openai.PermissionDeniedError:
            raise RuntimeError("no answer") from None
        return 1.0

    loop = make_loop(CALLABLE | {"session": {"max_turns": 1}})
    loop.agent = agent
    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        group, outputs = await run(loop, plane, monkeypatch)
        assert outputs and outputs.failure is None and outputs[-1].reward_score is None and group.limited == 1
        assert plane.sessions.journal.read(outputs.session_id).reason == Closed.LIMIT


class RefusingEngine(StubEngine):
    """Fails every call but the first."""

    async def generate(self, request: Any) -> AsyncGenerator[Any, None]:
        if self.seen:
            raise CallRefusedError(request.request_id, "the engine's own fault")
        async for chunk in super().generate(request):
            yield chunk


@pytest.mark.parametrize("own_error", [False, True])
async def test_a_call_that_an_engine_fails_is_no_failure_of_the_agent(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_error: bool
) -> None:
    async def agent(task: Any, endpoint: Any) -> float:
        await ask(endpoint)
        try:
            await ask(endpoint)
        except openai.APIStatusError:
            if own_error:
                raise RuntimeError("no answer") from None
            raise
        return 1.0

    monkeypatch.setattr("support.runner_plane.StubEngine", RefusingEngine)
    loop = make_loop(CALLABLE | {"failure_reward": 0.0})
    loop.agent = agent
    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        with pytest.raises(AgentFailedError, match="the agent engine_failed") as caught:
            await run(loop, plane, monkeypatch)
        assert caught.value.kind == "engine_failed"
        assert plane.sessions.accounts.total.dropped == {DropReason.ENGINE_FAILED: 3}


async def test_a_session_that_a_program_outside_closes_has_its_reason(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the service of its sandboxes does, by the admin API."""
    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:

        async def agent(task: Any, endpoint: Any) -> float:
            await ask(endpoint)
            await plane.sessions.gateway.admin.close(endpoint.session_id, Closed.TOOL_FAILED)
            await ask(endpoint)
            return 1.0

        loop = make_loop(CALLABLE | {"failure_reward": 0.0})
        loop.agent = agent
        with pytest.raises(AgentFailedError, match="the agent tool_failed"):
            await run(loop, plane, monkeypatch)
        assert plane.sessions.accounts.total.dropped == {DropReason.TOOL_FAILED: 3}
