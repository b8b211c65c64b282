"""Run an agent that is a Python callable, in this process.

It shares the interpreter: what it breaks, blocks or leaks is ours too. Run what is not trusted as a command.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.outcome import AgentOutcome, AgentStatus, reward_of, told
from seamless_verl.agents.threads import in_thread

Reward = float | Mapping[str, Any] | None
Agent = Callable[[Mapping[str, Any], Endpoint], Awaitable[Reward] | Reward]
GRACE_S = 5.0


async def call_agent(
    agent: Agent,
    task: Mapping[str, Any],
    endpoint: Endpoint,
    *,
    time_limit_s: float | None = None,
    grace_s: float = GRACE_S,
) -> AgentOutcome:
    """Run `agent(task, endpoint)` to a terminal outcome; it gets a deep copy of the task.

    At the time limit, and when the caller is cancelled, the agent is cancelled and has `grace_s` seconds to
    end; one that ignores this goes on unattended. What it raises becomes FAILED; a cancellation of the caller
    is raised again, after the agent's end.

    A callable that is no coroutine function runs in a thread of its own. A thread cannot be stopped: after
    its time it is abandoned, and runs on until it returns or the process ends.
    """
    began = time.monotonic()
    running = asyncio.create_task(value_of(agent, copy.deepcopy(dict(task)), endpoint))
    running.add_done_callback(hear)
    try:
        await asyncio.wait({running}, timeout=time_limit_s)
        duration, late = time.monotonic() - began, not running.done()
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait({running}, timeout=grace_s)
    if late:
        more = "" if running.done() else f"; it was cancelled, and still goes on {grace_s:g} s later"
        return AgentOutcome(AgentStatus.TIMED_OUT, duration, error=f"its {time_limit_s:g} s are over{more}")
    return outcome_of(running, duration)


async def value_of(agent: Agent, task: dict[str, Any], endpoint: Endpoint) -> object:
    try:
        if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(type(agent).__call__):
            return await agent(task, endpoint)  # type: ignore[misc]
        value = await in_thread(partial(agent, task, endpoint), daemon=True)
        return await value if inspect.isawaitable(value) else value  # a wrapper around a coroutine function
    except SystemExit as error:  # a task would raise it through the whole event loop
        raise RuntimeError(f"the agent called sys.exit({error.code!r})") from error


def outcome_of(running: asyncio.Task[object], duration: float) -> AgentOutcome:
    if running.cancelled():
        return AgentOutcome(AgentStatus.FAILED, duration, error="the agent cancelled itself")
    error = running.exception()
    if error is not None:
        return AgentOutcome(AgentStatus.FAILED, duration, error=told(error))
    try:
        reward, info = reward_of(running.result())
    except ValueError as wrong:
        return AgentOutcome(AgentStatus.FAILED, duration, error=f"the agent returned no reward: {wrong}")
    return AgentOutcome(AgentStatus.FINISHED, duration, reward=reward, reward_info=info)


def hear(running: asyncio.Task[object]) -> None:
    """Take note of the task's exception, also when nobody waits any more: asyncio logs it otherwise."""
    if not running.cancelled():
        running.exception()
