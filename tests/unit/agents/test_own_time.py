"""An agent's time limit counts its own time only."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.agents import ENDPOINT

from seamless_verl.agents import own_time
from seamless_verl.agents.callable import call_agent
from seamless_verl.agents.outcome import AgentStatus
from seamless_verl.agents.own_time import OwnTime
from seamless_verl.runtime.process import LATE_S, AwakeTime


async def test_a_limit_is_extended_by_the_time_in_which_calls_waited() -> None:
    began, paused_s = time.monotonic(), 0.6

    async def paused() -> float:
        return min(time.monotonic() - began, paused_s)

    async def agent(task: object, endpoint: object) -> float:
        await asyncio.sleep(0.5)
        return 1.0

    outcome = await call_agent(agent, {}, ENDPOINT, time_limit_s=0.1, paused=paused)
    assert (outcome.status, outcome.reward) == (AgentStatus.FINISHED, 1.0)


async def test_it_is_over_when_the_agent_has_used_it() -> None:
    async def paused() -> float:
        return 0.3

    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    own, began = OwnTime(paused), time.monotonic()
    await own.wait(never, 0.2)
    assert 0.5 <= time.monotonic() - began < 5 and own.paused_s == 0.3
    outcome = await call_agent(lambda task, endpoint: never, {}, ENDPOINT, time_limit_s=0.1, paused=paused)
    assert outcome.status is AgentStatus.TIMED_OUT and outcome.paused_s == 0.3 and outcome.duration_s >= 0.4


async def test_what_a_process_counted_before_it_ended_is_known_by_then() -> None:
    began = time.monotonic()

    async def paused() -> float:
        elapsed = time.monotonic() - began
        return min(elapsed, 0.8) if elapsed < 0.95 else 0.0  # it was started again

    async def agent(task: object, endpoint: object) -> float:
        await asyncio.sleep(1.3)
        return 1.0

    outcome = await call_agent(agent, {}, ENDPOINT, time_limit_s=1.0, paused=paused)
    assert outcome.status is AgentStatus.FINISHED


async def test_the_end_of_the_work_ends_a_question_without_an_answer() -> None:
    asked = asyncio.Event()

    async def paused() -> float:
        asked.set()
        return await asyncio.Future()

    own, work = OwnTime(paused), asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(own.wait(work, 0.1))
    await asked.wait()
    work.set_result(None)
    await asyncio.wait_for(waiting, 5)


async def test_what_was_counted_before_a_restart_of_the_counting_process_stays_counted() -> None:
    replies = iter([0.3, 0.1, 0.1, 0.1])

    async def paused() -> float:
        return next(replies)

    own = OwnTime(paused)
    await own.wait(asyncio.get_running_loop().create_future(), 0.1)
    assert own.paused_s == 0.3 + 0.1


async def test_the_time_in_which_the_process_stood_still_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    stood_still_s = 0.0
    monkeypatch.setattr(
        own_time, "AwakeTime", lambda late_s: AwakeTime(late_s=late_s, now=lambda: time.monotonic() + stood_still_s)
    )
    monkeypatch.setattr(own_time, "_clocks", {})
    monkeypatch.setattr(own_time, "BLOCKED_S", LATE_S)

    async def paused() -> float:
        return 0.0

    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    own, other = OwnTime(paused), OwnTime(paused)
    assert own._clock is other._clock, "an event loop beats once for all of its agents"
    waiting = [
        asyncio.create_task(own.wait(work, LATE_S + 0.6)),
        asyncio.create_task(other.wait(work, LATE_S / 2)),
    ]
    await asyncio.sleep(0)
    stood_still_s = 500.0
    await asyncio.sleep(0.4)
    assert [one.done() for one in waiting] == [False, True]
    work.set_result(None)
    await asyncio.gather(*waiting)
