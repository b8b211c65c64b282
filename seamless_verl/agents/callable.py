"""Finds and runs an agent that is a Python callable, in this process, which it shares: untrusted code is for a command.

Blocking work gets a thread of its own for each piece. With a pool, agents that block would keep the clean-up of
finished ones waiting. Coroutines of one event loop begin one after another, and between two of them the loop runs once
for all others: hundreds begin at once, each makes a client first (45 ms of certificates for one of the OpenAI SDK), and
without a pause connections would wait beyond their limit of 5 s.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import copy
import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.failures import status_of
from seamless_verl.agents.outcome import AgentOutcome, AgentStatus, reward_of, traceback_end
from seamless_verl.agents.own_time import OwnTime, PausedSeconds
from seamless_verl.errors import ConfigError


def load_agent(where: str, *, key: str = "agent") -> Callable[..., Any]:
    """The callable at `where`; each call runs a file again, so load once and keep it.

    Raises ConfigError, with `key` as the setting's name; an error of an import is its cause.
    """
    place, _, name = where.rpartition(":")
    if not place or not name:
        raise ConfigError(key, where, "is not of the form place:name", "Write pkg.module:name or path/to/file.py:name")
    module = load_file(Path(place), where, key) if place.endswith(".py") else load_module(place, where, key)
    try:
        agent = attrgetter(name)(module)
    except AttributeError as error:
        named = ", ".join(item for item in vars(module) if not item.startswith("_"))
        raise ConfigError(key, where, f"{place} has no '{name}'", f"It has: {named or 'nothing'}") from error
    if not callable(agent):
        way_out = "Name an `async def agent(task, endpoint)`"
        raise ConfigError(key, where, f"'{name}' is a {type(agent).__name__}, which cannot be called", way_out)
    return agent  # type: ignore[no-any-return]


def load_module(place: str, where: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise import_error(key, where, error) from error
        way_out = "Install it or put its folder on PYTHONPATH, or name a file as path/to/file.py:name"
        raise ConfigError(key, where, f"there is no module '{error.name}'", way_out) from error
    except Exception as error:  # the user's module may raise anything
        raise import_error(key, where, error) from error


def load_file(path: Path, where: str, key: str) -> ModuleType:
    if not path.is_file():
        way_out = f"Paths are taken from the working directory, {Path.cwd()}"
        raise ConfigError(key, where, f"there is no file {path}", way_out)
    name = f"seamless_agent_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a path that ends in .py has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's file may raise anything
        del sys.modules[name]
        raise import_error(key, where, error) from error
    return module


def import_error(key: str, where: str, error: Exception) -> ConfigError:
    reason = f"importing it raised {type(error).__name__}: {error}"
    return ConfigError(key, where, reason, "Import it by itself to see the whole traceback")


T = TypeVar("T")


def in_thread(work: Callable[[], T], *, daemon: bool) -> asyncio.Future[T]:
    """Run `work` in a thread of its own; the future has its value or its exception.

    Cancelling the future does not stop the thread. The interpreter's exit waits for it unless it is a `daemon`.
    StopIteration and TimeoutError arrive as the cause of a RuntimeError.
    """
    promise: concurrent.futures.Future[T] = concurrent.futures.Future()
    promise.set_running_or_notify_cancel()

    def body() -> None:
        try:
            promise.set_result(work())
        except (StopIteration, TimeoutError) as error:  # a future cannot carry either of them itself
            wrapped = RuntimeError(repr(error))
            wrapped.__cause__ = error
            promise.set_exception(wrapped)
        except BaseException as error:  # passed to the waiting caller, also a SystemExit
            promise.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(body,), daemon=daemon).start()
    return asyncio.wrap_future(promise)


async def wait_uncancelled(work: asyncio.Future[T]) -> T:
    """Wait for `work` to end, even when the caller is cancelled meanwhile; a cancellation is raised after it."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        work.exception()  # marks it as retrieved; the cancellation is raised instead
        raise cancelled
    return work.result()


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
    paused: PausedSeconds | None = None,
) -> AgentOutcome:
    """Runs `agent(task, endpoint)`, which gets a deep copy of the task, to a terminal outcome.

    The time limit counts the agent's own time, without the seconds that `paused` gives nor a coroutine's wait to begin.
    At the limit, and when the caller is cancelled, the agent is cancelled and has `grace_s` seconds to end; one that
    ignores this, as a thread of a plain function must, keeps running, and nobody waits for it. An exception becomes
    what `status_of` says. A cancellation of the caller is raised again after the agent's end.
    """
    if is_coroutine_function(agent):
        await wait_to_begin()
    began, own_time = time.monotonic(), OwnTime(paused)
    running = asyncio.create_task(run_agent(agent, copy.deepcopy(dict(task)), endpoint))
    running.add_done_callback(retrieve_exception)
    try:
        await own_time.wait(running, time_limit_s)
        duration, late = time.monotonic() - began, not running.done()
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait({running}, timeout=grace_s)
    if late:
        more = "" if running.done() else f"; it was cancelled, and still runs {grace_s:g} s later"
        error = f"its {time_limit_s:g} s are over{more}"
        return AgentOutcome(AgentStatus.TIMED_OUT, duration, paused_s=own_time.paused_s, error=error)
    return outcome_of(running, duration, endpoint)


@dataclass
class BeginOrder:
    """Of one event loop: who has the lock begins next; `callers` have it or wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    callers: int = 0


begin_orders: dict[asyncio.AbstractEventLoop, BeginOrder] = {}
"""Of the loops in which somebody waits to begin. A loop's entry is touched by its own thread alone."""


async def wait_to_begin() -> None:
    """Wait until the callers before have begun, and the event loop has run once since."""
    loop = asyncio.get_running_loop()
    order = begin_orders.setdefault(loop, BeginOrder())
    order.callers += 1
    try:
        async with order.lock:
            await asyncio.sleep(0)  # lets the loop run once for all others: nothing else is waited for
    finally:
        order.callers -= 1
        if not order.callers:
            del begin_orders[loop]


def is_coroutine_function(agent: Agent) -> bool:
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(type(agent).__call__)


async def run_agent(agent: Agent, task: dict[str, Any], endpoint: Endpoint) -> object:
    try:
        if is_coroutine_function(agent):
            return await agent(task, endpoint)  # type: ignore[misc]
        value = await in_thread(partial(agent, task, endpoint), daemon=True)
        if inspect.isawaitable(value):  # a wrapper around a coroutine function; this wait is within its time limit
            await wait_to_begin()
            return await value
        return value
    except SystemExit as error:  # a task would raise it through the whole event loop
        raise RuntimeError(f"the agent called sys.exit({error.code!r})") from error
    except KeyboardInterrupt as error:  # so would this, and end the agents of all other sessions
        raise RuntimeError("the agent raised KeyboardInterrupt") from error


def outcome_of(running: asyncio.Task[object], duration: float, endpoint: Endpoint) -> AgentOutcome:
    if running.cancelled():
        return AgentOutcome(AgentStatus.FAILED, duration, error="the agent cancelled itself")
    error = running.exception()
    if error is not None:
        return AgentOutcome(status_of(error, endpoint), duration, error=traceback_end(error))
    try:
        reward, info = reward_of(running.result())
    except ValueError as wrong:
        return AgentOutcome(AgentStatus.INVALID_REWARD, duration, error=f"its reward: {wrong}")
    return AgentOutcome(AgentStatus.FINISHED, duration, reward=reward, reward_info=info)


def retrieve_exception(running: asyncio.Task[object]) -> None:
    """Retrieve the task's exception, also when nobody waits for it any more: asyncio would log it otherwise."""
    if not running.cancelled():
        running.exception()
