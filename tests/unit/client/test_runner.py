"""A result that the run does not take costs one task, and not its runner; a restart of the run costs no time."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from seamless_verl.client.connection import RunConnection
from seamless_verl.client.runner import Runner, TaskRefusedError, function_agent, run_until_stopped
from seamless_verl.errors import OutsideApiError

LEASE = {
    "lease_id": "l",
    "task_id": "t",
    "agent": "default",
    "attempt": 1,
    "task": {},
    "session_id": "s",
    "key": "k",
    "time_limit_s": 60,
    "lease_s": 60,
}


class Run:
    """A run's replies: one task after another, and `refusals` of the first completions, as status and code."""

    def __init__(self, *refusals: tuple[int, str], **lease: Any) -> None:
        self.refusals, self.said = list(refusals), list[tuple[str, Any]]()
        self.lease, self.paused_s = LEASE | lease, [0.0]
        self.pages: dict[str, list[int]] = {}  # of a proxy, by what was asked: their statuses

    def handle(self, request: httpx.Request) -> httpx.Response:
        what = request.url.path.rpartition("/")[2]
        if self.pages.get(what):
            return httpx.Response(self.pages[what].pop(0), text="<h1>not the run</h1>")
        if what == "lease":
            return httpx.Response(200, json={"lease": self.lease})
        if what == "heartbeat":
            paused_s = self.paused_s.pop(0) if len(self.paused_s) > 1 else self.paused_s[0]
            return httpx.Response(200, json={"lease_s": 60, "paused_s": paused_s})
        self.said.append((what, json.loads(request.content)))
        if what == "complete" and self.refusals:
            status, code = self.refusals.pop(0)
            return httpx.Response(status, json={"error": {"code": code, "message": "why"}})
        return httpx.Response(200, json={})


async def ran(run: Run, agent: Any, *, tasks: int = 1) -> Runner:
    connection = RunConnection("http://run", "key", runner="r")
    connection._http = httpx.AsyncClient(transport=httpx.MockTransport(run.handle), base_url="http://run")
    async with connection:
        runner = Runner(connection, {"default": function_agent(agent)})
        await runner.run(max_tasks=tasks)
    return runner


async def test_a_result_that_is_not_taken_fails_its_task_and_the_runner_goes_on() -> None:
    run = Run((413, "request_too_large"))
    runner = await ran(run, lambda task, endpoint: {"reward": 1.0, "much": "x"}, tasks=2)
    (_, first), (_, second), (_, third) = run.said
    assert (first["status"], second["status"], third["status"]) == ("finished", "failed", "finished")
    assert second["reward_info"] == {} and second["reward"] is None
    assert "413 request_too_large: why" in second["error"]
    assert runner.done == 2


async def test_a_task_whose_failure_is_not_taken_either_is_refused() -> None:
    run = Run((400, "malformed_request"), (400, "malformed_request"))
    runner = await ran(run, lambda task, endpoint: 1.0)
    assert [what for what, _ in run.said] == ["complete", "complete", "return"]
    assert run.said[-1][1] == {"reason": "400 malformed_request: why", "refused": True} and runner.done == 0


@pytest.mark.parametrize("refusal", [(401, "invalid_api_key"), (401, "no_json"), (400, "protocol_version")])
async def test_a_refusal_of_the_runner_ends_it(refusal: tuple[int, str]) -> None:
    with pytest.raises(OutsideApiError):
        await ran(Run(refusal), lambda task, endpoint: 1.0)


async def test_pages_of_a_proxy_end_neither_an_agent_nor_its_runner() -> None:
    """The run is being started again: heartbeats, questions for waiting time, results and leases meet such pages."""
    run = Run(time_limit_s=0.1, lease_s=0.3)
    run.paused_s = [5.0]

    async def agent(task: Any, endpoint: Any) -> float:
        run.pages = {"heartbeat": [530, 404, 200], "complete": [404], "lease": [530]}
        await asyncio.sleep(0.8)
        return 1.0

    runner = await ran(run, agent, tasks=2)
    assert [(what, said["status"]) for what, said in run.said] == [("complete", "finished")] * 2 and runner.done == 2


async def test_a_page_at_the_address_before_the_run_ever_replied_ends_the_runner() -> None:
    run = Run()
    run.pages = {"lease": [404]}
    with pytest.raises(OutsideApiError, match="404 no_json"):
        await ran(run, lambda task, endpoint: 1.0)


async def test_text_that_is_no_unicode_is_sent() -> None:
    def failing(task: Any, endpoint: Any) -> float:
        raise ValueError("half \ud800")

    def refusing(task: Any, endpoint: Any) -> float:
        raise TaskRefusedError("half \ud800")

    run = Run()
    await ran(run, failing)
    await ran(run, refusing)
    (_, failed), (_, refused) = run.said
    assert failed["status"] == "failed" and "half ?" in failed["error"]
    assert refused == {"reason": "half ?", "refused": True}


async def test_what_a_heartbeat_said_of_waiting_is_known_after_a_restart_of_the_run() -> None:
    run = Run(time_limit_s=0.1)
    run.paused_s = [5.0, 0.0]  # of a heartbeat, and of the question when the limit is over

    async def agent(task: Any, endpoint: Any) -> float:
        await asyncio.sleep(0.4)
        return 1.0

    await ran(run, agent)
    assert run.said[0][1]["status"] == "finished"


class WaitingRun(Run):
    """It has one task; whoever asks for another one waits. `takes_back` is the status of that task's return."""

    def __init__(self, takes_back: int = 200) -> None:
        super().__init__()
        self.takes_back, self.asked, self.one_waits = takes_back, 0, asyncio.Event()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/runner/lease":
            self.asked += 1
            if self.asked > 1:
                self.one_waits.set()
                await asyncio.Future()
        if request.url.path == "/runner/leases/l/return" and self.takes_back != 200:
            return httpx.Response(self.takes_back, json={"error": {"code": "malformed_request", "message": "why"}})
        return self.handle(request)


class SlowAgent:
    """An agent that takes `ends_s` to end when it is cancelled."""

    def __init__(self, ends_s: float) -> None:
        self.ends_s, self.began, self.ended = ends_s, asyncio.Event(), False

    async def run(self, task: Any, endpoint: Any) -> float:
        self.began.set()
        try:
            return await asyncio.Future()
        finally:
            await asyncio.sleep(self.ends_s)
            self.ended = True


@asynccontextmanager
async def busy_and_idle(run: WaitingRun, agent: SlowAgent) -> AsyncIterator[Runner]:
    """A runner with two slots, of which one has the task."""
    connection = RunConnection("http://run", "key", runner="r")
    connection._http = httpx.AsyncClient(transport=httpx.MockTransport(run.answer), base_url="http://run")
    async with connection, asyncio.timeout(30):
        yield Runner(connection, {"default": function_agent(agent.run)}, slots=2)


async def test_a_busy_slot_gives_its_task_back_after_an_idle_one_has_ended() -> None:
    run, agent = WaitingRun(), SlowAgent(0.2)
    async with busy_and_idle(run, agent) as runner:
        working = asyncio.create_task(runner.run())
        await agent.began.wait()
        await run.one_waits.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
    assert agent.ended and ("return", {"reason": "the runner was stopped", "refused": False}) in run.said
    assert (runner.held, runner.given_back) == (1, 1)


async def test_a_second_stop_waits_neither_for_agents_nor_for_the_run() -> None:
    run, agent = WaitingRun(), SlowAgent(60.0)
    async with busy_and_idle(run, agent) as runner:
        working = asyncio.create_task(runner.run())
        await agent.began.wait()
        working.cancel()
        await asyncio.sleep(0.05)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
    assert (runner.held, runner.given_back) == (1, 0)


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (200, "stopped; its tasks were given back"),
        (400, "stopped; the run did not take back 1 of its 1 tasks"),
        (401, "stopped; the run did not take back 1 of its 1 tasks"),
        (410, "stopped; its tasks were given back"),
    ],
)
async def test_the_last_line_says_what_was_given_back(
    status: int, line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, agent, handlers = WaitingRun(status), SlowAgent(0.0), list[Any]()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "add_signal_handler", lambda number, handler: handlers.append(handler))
    async with busy_and_idle(run, agent) as runner:
        with caplog.at_level(logging.INFO, logger="seamless_verl"):
            working = asyncio.create_task(run_until_stopped(runner))
            await agent.began.wait()
            await run.one_waits.wait()
            handlers[0]()
            await working
    assert caplog.records[-1].getMessage().startswith(line)
