"""Find a user's agent by its name: `pkg.module:name`, or `path/to/file.py:name`.

Blocking work beside the event loop, one thread for each piece.

A pool would let agents that block starve the clearing up of those that ended.

Run an agent that is a Python callable, in this process.

It shares the interpreter: what it breaks, blocks or leaks is ours too. Run what is not trusted as a command.
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
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.outcome import AgentOutcome, AgentStatus, reward_of, told
from seamless_verl.errors import ConfigError


def load_agent(where: str, *, key: str = "agent") -> Callable[..., Any]:
    """The callable at `where`; a file is run anew each time, so load once and keep it.

    Raises ConfigError, with `key` as the setting's name, for a place that is not there, a module whose
    import raises (that error is the cause), a missing name, and a name that cannot be called.
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
            raise broken(key, where, error) from error
        way_out = "Install it or put its folder on PYTHONPATH, or name a file as path/to/file.py:name"
        raise ConfigError(key, where, f"there is no module '{error.name}'", way_out) from error
    except Exception as error:  # the user's module may raise anything
        raise broken(key, where, error) from error


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
        raise broken(key, where, error) from error
    return module


def broken(key: str, where: str, error: Exception) -> ConfigError:
    reason = f"importing it raised {type(error).__name__}: {error}"
    return ConfigError(key, where, reason, "Import it by itself to see the whole traceback")


T = TypeVar("T")


def in_thread(work: Callable[[], T], *, daemon: bool) -> asyncio.Future[T]:
    """Run `work` in a thread of its own; the future has its value or its exception.

    Cancelling the future abandons the thread, it does not stop it. The interpreter's exit waits for the
    thread unless it is a `daemon`. StopIteration and TimeoutError come as the cause of a RuntimeError.
    """
    promise: concurrent.futures.Future[T] = concurrent.futures.Future()
    promise.set_running_or_notify_cancel()

    def body() -> None:
        try:
            promise.set_result(work())
        except (StopIteration, TimeoutError) as error:  # a future carries neither as it is
            wrapped = RuntimeError(repr(error))
            wrapped.__cause__ = error
            promise.set_exception(wrapped)
        except BaseException as error:  # carried to who waits, also a SystemExit
            promise.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(body,), daemon=daemon).start()
    return asyncio.wrap_future(promise)


async def to_the_end(work: asyncio.Future[T]) -> T:
    """Wait for `work` however often the caller is cancelled meanwhile; only then is the cancellation raised."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        work.exception()  # heard; the cancellation goes first
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
