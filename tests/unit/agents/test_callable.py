"""A Python agent ends in exactly one outcome, whatever it does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from support.agents import ENDPOINT

from seamless_verl.agents.callable import Agent, call_agent
from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.outcome import ERROR_CHARS, AgentOutcome, AgentStatus

Task = Mapping[str, Any]


def called(agent: Agent, task: Task | None = None, **options: Any) -> AgentOutcome:
    return asyncio.run(call_agent(agent, task or {}, ENDPOINT, **options))


def giving(value: Any) -> Agent:
    async def agent(task: Task, endpoint: Endpoint) -> Any:
        return value

    return agent


def raising(error: BaseException) -> Agent:
    async def agent(task: Task, endpoint: Endpoint) -> float:
        raise error

    return agent


def test_what_it_returns_is_its_reward() -> None:
    outcome = called(giving({"reward": 1, "steps": 3}))
    assert (outcome.status, outcome.reward, outcome.reward_info) == (AgentStatus.FINISHED, 1.0, {"steps": 3})
    assert called(giving(None)).reward is None


def test_it_gets_the_endpoint_and_a_task_of_its_own() -> None:
    async def agent(task: Task, endpoint: Endpoint) -> float:
        task["turns"].append("mine")
        return float(endpoint is ENDPOINT)

    task: dict[str, Any] = {"turns": []}
    assert called(agent, task).reward == 1.0 and task == {"turns": []}


@pytest.mark.parametrize("value", ["good", float("nan"), {"score": 1}])
def test_a_malformed_reward_is_named(value: Any) -> None:
    outcome = called(giving(value))
    assert outcome.status == AgentStatus.INVALID_REWARD and outcome.error.startswith("its reward: ")


ERRORS = [error("boom") for error in (ValueError, TimeoutError, SystemExit, StopIteration, KeyboardInterrupt)]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("blocking", [False, True])
def test_what_it_raises_is_a_failure_with_its_traceback(error: BaseException, blocking: bool) -> None:
    def agent(task: Task, endpoint: Endpoint) -> float:
        raise error

    outcome = called(agent if blocking else raising(error), time_limit_s=20.0)
    assert outcome.status == AgentStatus.FAILED and "boom" in outcome.error and "in agent" in outcome.error


def test_a_long_traceback_keeps_its_end() -> None:
    outcome = called(raising(ValueError("x" * 10_000 + "end")))
    assert len(outcome.error) == ERROR_CHARS and outcome.error.rstrip().endswith("end")


def test_it_may_cancel_itself() -> None:
    assert called(raising(asyncio.CancelledError())).error == "the agent cancelled itself"


def test_at_its_limit_it_is_cancelled_and_its_late_reward_does_not_count() -> None:
    heard = []

    async def agent(task: Task, endpoint: Endpoint) -> float:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            heard.append("cancelled")
        return 1.0

    outcome = called(agent, time_limit_s=0.05)
    assert outcome.status == AgentStatus.TIMED_OUT and heard == ["cancelled"] and outcome.reward is None
    assert 0.05 <= outcome.duration_s < 5 and "0.05 s are over" in outcome.error


async def test_one_that_ignores_its_cancellation_is_left_behind() -> None:
    free = asyncio.Event()

    async def agent(task: Task, endpoint: Endpoint) -> None:
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue

    outcome = await call_agent(agent, {}, ENDPOINT, time_limit_s=0.02, grace_s=0.05)
    free.set()
    assert outcome.status == AgentStatus.TIMED_OUT and "still runs" in outcome.error


async def test_a_cancellation_reaches_the_agent_before_the_caller() -> None:
    started, ended = asyncio.Event(), False

    async def agent(task: Task, endpoint: Endpoint) -> None:
        nonlocal ended
        started.set()
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.01)
            ended = True

    call = asyncio.create_task(call_agent(agent, {}, ENDPOINT))
    await started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended


def test_one_that_blocks_runs_beside_the_loop_and_is_abandoned_at_its_limit() -> None:
    free, ended = threading.Event(), threading.Event()

    def agent(task: Task, endpoint: Endpoint) -> float:
        free.wait(20)
        ended.set()
        return 1.0

    began = time.monotonic()
    assert called(agent, time_limit_s=0.05).status == AgentStatus.TIMED_OUT
    assert time.monotonic() - began < 10 and not ended.is_set()
    free.set()
    assert ended.wait(20)


def test_blocking_callables_and_wrappers_give_rewards_too() -> None:
    class Callable:
        async def __call__(self, task: Task, endpoint: Endpoint) -> float:
            return float(threading.current_thread() is threading.main_thread())

    async def inner(task: Task, endpoint: Endpoint) -> float:
        return float(threading.current_thread() is threading.main_thread())

    assert called(lambda task, endpoint: float(threading.current_thread() is not threading.main_thread())).reward == 1.0
    assert called(lambda task, endpoint: inner(task, endpoint)).reward == 1.0
    assert called(Callable()).reward == 1.0


async def test_more_blocking_agents_than_a_pool_has_threads_all_run() -> None:
    count = 40
    together = threading.Barrier(count)

    agents = (call_agent(lambda t, e: together.wait(20) >= 0, {}, ENDPOINT) for _ in range(count))
    assert all(outcome.reward == 1.0 for outcome in await asyncio.gather(*agents))


@pytest.mark.parametrize("wrapped", [False, True])
def test_agents_of_one_loop_begin_one_by_one_so_that_none_waits_for_all_others_clients(wrapped: bool) -> None:
    """An agent continues while those after it begin: a connection of its client is not kept waiting."""
    count, steps, begun = 50, 6, list[int]()
    waited = dict[int, int]()

    async def agent(task: Any, endpoint: Any) -> float:
        begun.append(task["number"])
        for _ in range(steps):  # each waits for the event loop to go round, as a connection does
            await asyncio.sleep(0)
        waited[task["number"]] = len(begun) - 1 - begun.index(task["number"])
        return 1.0

    async def all_at_once() -> None:
        called = (lambda task, endpoint: agent(task, endpoint)) if wrapped else agent
        await asyncio.gather(*(call_agent(called, {"number": number}, ENDPOINT) for number in range(count)))

    asyncio.run(all_at_once())
    assert sorted(begun) == list(range(count)) and max(waited.values()) <= steps


def test_an_agent_that_is_cancelled_while_it_waits_never_begins_and_keeps_nobody_waiting() -> None:
    begun = list[str]()

    async def agent(task: Any, endpoint: Any) -> float:
        begun.append(task["name"])
        return 1.0

    async def cancel_one() -> None:
        calls = {name: asyncio.create_task(call_agent(agent, {"name": name}, ENDPOINT)) for name in "abc"}
        await asyncio.sleep(0)
        calls["b"].cancel()
        await asyncio.gather(*calls.values(), return_exceptions=True)
        assert calls["b"].cancelled()

    asyncio.run(cancel_one())
    assert begun == ["a", "c"]
