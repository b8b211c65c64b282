"""Agent loops are made as verl makes them: by hydra, of an entry in the file of agent loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import hydra
import numpy as np
import openai
import pytest
import ray
from omegaconf import OmegaConf
from support.agent_loops import make_loop
from support.gateway import gateway_harness

from seamless_verl.agent_loops.loops import AgentFailedError, closing_reason, task_of, warn_of_unread, warn_once
from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.limits import CommandLimits
from seamless_verl.agents.outcome import AgentOutcome, AgentStatus
from seamless_verl.agents.settings import SamplingDefaults, SessionQuota
from seamless_verl.data_plane.finished_sessions import FinishedSession
from seamless_verl.data_plane.lease_book import DONE, LOST, UNCLAIMED, TaskResult, TaskState
from seamless_verl.trajectory.session import Closed
from seamless_verl.trajectory.turns import TurnNote

pytestmark = pytest.mark.integration
LOOPS = "seamless_verl.agent_loops.loops"


def test_a_command_loop_has_what_its_entry_says() -> None:
    entry = {"name": "shell", "_target_": f"{LOOPS}.CommandAgentLoop", "command": ["sleep", 1], "env": {"A": "1"}}
    entry |= {"session": {"max_turns": 3}, "sampling": {"seed": 7}, "limits": {"cpu_s": 3}, "time_limit_s": 60}
    loop = make_loop(entry)
    assert loop.settings.session == SessionQuota(max_turns=3)
    assert loop.settings.sampling == SamplingDefaults(seed=7) and loop.settings.failure_reward is None
    assert (loop.command.command, loop.command.env) == (["sleep", "1"], {"A": "1"})
    assert loop.command.limits == CommandLimits(wall_s=60, cpu_s=3)


def test_a_callable_loop_has_its_agent() -> None:
    loop = make_loop({"name": "mine", "_target_": f"{LOOPS}.CallableAgentLoop", "agent": "operator:add"})
    assert loop.agent(1, 2) == 3 and loop.settings.time_limit_s == 600


def test_an_entry_that_cannot_work_is_refused() -> None:
    entry = {"name": "mine", "_target_": f"{LOOPS}.CallableAgentLoop", "agent": "operator:add"}
    with pytest.raises(hydra.errors.InstantiationException) as caught:
        make_loop(entry | {"session": {"max_turns": 0}})
    assert str(caught.value.__cause__).startswith("mine.session.max_turns=0: must be a whole number of at least 1")


@pytest.mark.parametrize(
    ("settings", "status", "posted", "expected"),
    [
        ({}, AgentStatus.LIMIT, {"reward": 0.5}, 0.5),
        ({"failure_reward": 0.0}, AgentStatus.LIMIT, {}, None),
        ({}, AgentStatus.TIMED_OUT, {}, None),
        ({}, AgentStatus.TIMED_OUT, {"reward": 0.5}, 0.5),
        ({"failure_reward": 0.0}, AgentStatus.TIMED_OUT, {}, 0.0),
        ({"on_timeout": "drop"}, AgentStatus.TIMED_OUT, {"reward": 0.5}, AgentFailedError),
        ({}, AgentStatus.FAILED, {"reward": 0.5}, AgentFailedError),
        ({"failure_reward": 0.0}, AgentStatus.FAILED, {"reward": 0.5}, 0.0),
        ({"failure_reward": 0.0, "on_timeout": "drop"}, AgentStatus.FAILED, {}, 0.0),
        *(
            ({"failure_reward": 0.0}, status, {"reward": 0.5}, AgentFailedError)
            for status in (AgentStatus.TOOL_FAILED, AgentStatus.ENGINE_FAILED, AgentStatus.EXPIRED)
        ),
    ],
)
def test_what_each_end_is_worth(
    settings: dict[str, Any], status: AgentStatus, posted: dict[str, float], expected: object
) -> None:
    entry = {"name": "mine", "_target_": f"{LOOPS}.CallableAgentLoop", "agent": "operator:add"}
    loop, outcome = make_loop(entry | settings), AgentOutcome(status, reward=None)
    session = FinishedSession([], posted, 1)
    if expected is AgentFailedError:
        with pytest.raises(AgentFailedError):
            loop.reward(outcome, session)
    else:
        assert loop.reward(outcome, session) == expected
    assert closing_reason(outcome) == status


@pytest.mark.parametrize("excepted", ["", "example.org"])
async def test_a_proxy_of_the_process_does_not_stand_before_the_gateway(
    nano: Path, monkeypatch: pytest.MonkeyPatch, excepted: str
) -> None:
    """A function of the user's calls by an SDK, which takes the proxy of the environment for any other host."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("no_proxy", excepted)
    monkeypatch.setenv("NO_PROXY", "")

    async def agent(task: dict[str, Any], endpoint: Endpoint) -> float:
        message = {"role": "user", "content": "hi"}
        for _ in range(2):
            async with openai.AsyncOpenAI(
                base_url=f"{endpoint.base_url}/v1", api_key=endpoint.session_key, max_retries=0
            ) as client:
                await client.chat.completions.create(model="nano", messages=[message])  # type: ignore[list-item]
        return 1.0

    loop = make_loop({"name": "mine", "_target_": f"{LOOPS}.CallableAgentLoop", "agent": "operator:add"})
    loop.agent = agent
    async with gateway_harness(nano) as harness:
        opened: concurrent.futures.Future[dict[str, str]] = concurrent.futures.Future()
        opened.set_result(harness.session)
        remote = SimpleNamespace(remote=lambda opening: SimpleNamespace(future=lambda: opened))
        _, outcome = await loop.run_session(SimpleNamespace(open_session=remote), "u_0", {"uid": "u"}, {})
        assert (outcome.status, outcome.reward) == (AgentStatus.FINISHED, 1.0), outcome
    host = httpx.URL(harness.gateway.url).host
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == ",".join(filter(None, (excepted, host)))


@pytest.mark.parametrize("state", [LOST, UNCLAIMED])
async def test_a_task_that_no_runner_did_fails_with_its_state_and_its_reason(state: TaskState) -> None:
    loop = make_loop({"name": "fleet", "_target_": f"{LOOPS}.RunnerAgentLoop", "agent": "coder"})
    reply: concurrent.futures.Future[TaskResult] = concurrent.futures.Future()
    reply.set_result(TaskResult(state, 2, error="no docker"))
    plane = SimpleNamespace(run_task=SimpleNamespace(remote=lambda order: SimpleNamespace(future=lambda: reply)))
    with pytest.raises(AgentFailedError, match=f"is {state}: no docker") as caught:
        await loop.run_session(plane, "u_0", {"uid": "u"}, {})
    assert caught.value.kind == str(state)


@pytest.mark.parametrize("done", [True, False])
async def test_the_session_of_a_task_that_was_done_as_its_loop_was_cancelled_is_dropped(
    done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A withdrawn task has none."""
    monkeypatch.setattr("ray.cancel", lambda call, recursive: None)
    loop = make_loop({"name": "fleet", "_target_": f"{LOOPS}.RunnerAgentLoop", "agent": "coder"})
    asked: list[tuple[Any, ...]] = []

    def method(name: str, reply: concurrent.futures.Future[Any]) -> SimpleNamespace:
        def remote(*given: Any) -> SimpleNamespace:
            asked.append((name, *given))
            return SimpleNamespace(future=lambda: reply)

        return SimpleNamespace(remote=remote)

    nothing: concurrent.futures.Future[None] = concurrent.futures.Future()
    nothing.set_result(None)
    reply: concurrent.futures.Future[TaskResult] = concurrent.futures.Future()
    plane = SimpleNamespace(
        run_task=method("run_task", reply),
        close_session=method("close_session", nothing),
        acknowledge=method("acknowledge", nothing),
    )
    running = asyncio.create_task(loop.run_session(plane, "u_0", {"uid": "u"}, {}))
    await asyncio.sleep(0)
    if done:
        reply.set_result(TaskResult(DONE, 1, session_id="s"))
    else:
        reply.set_exception(ray.exceptions.TaskCancelledError())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    dropped = [("close_session", "s", Closed.ABANDONED)] * done
    assert [one for one in asked if one[0] == "close_session"] == dropped
    assert [one[1:3] for one in asked if one[0] == "acknowledge"] == [("s", False)] * done


def test_a_task_has_the_plain_columns_of_its_row() -> None:
    row = {"raw_prompt": np.array([{"role": "user", "content": "q"}]), "repo": "r", "count": np.int64(3)}
    row |= {"extra_info": {"a": np.array([1, 2])}, "image": object(), "agent_name": "mine", "session_id": 4, "uid": "u"}
    prompt = [{"role": "user", "content": "q"}]
    assert task_of(row) == {"prompt": prompt, "repo": "r", "count": 3, "extra_info": {"a": [1, 2]}, "uid": "u"}


@pytest.mark.parametrize(("estimator", "reward", "lines"), [("grpo", 0.5, 1), ("hgpo", 0.5, 0), ("grpo", 0.0, 0)])
def test_rewards_of_calls_that_nothing_reads_are_said_once(
    caplog: pytest.LogCaptureFixture, estimator: str, reward: float, lines: int
) -> None:
    warn_once.cache_clear()
    session = FinishedSession([], {}, 1, trained_turns={"s.1": TurnNote(0, 7, reward)})
    for _ in range(2):
        warn_of_unread(OmegaConf.create({"algorithm": {"adv_estimator": estimator}}), session)
    assert [record.message for record in caplog.records] == [
        "algorithm.adv_estimator=grpo: does not read the rewards of calls. Set algorithm.adv_estimator=hgpo"
    ] * lines
