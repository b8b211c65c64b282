"""The thread that looks, and the stacks it can show."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Generator, Sequence
from typing import Any

import pytest
from ledger_cases import Clock

from seamless_verl.resources.watchdog import Finding, Verdict, Watchdog, stacks, watch


def overdue(*ids: str) -> Watchdog:
    watched = Watchdog({})
    for name in ids:
        watched.began("call", name, deadline=0.0)
    return watched


def test_it_tells_once_of_what_is_stuck_and_again_of_what_is_new() -> None:
    watched, told, news = overdue("a"), [], threading.Semaphore(0)

    def on_stuck(findings: Sequence[Finding]) -> None:
        told.append([finding.id for finding in findings])
        news.release()

    with watch(watched, on_stuck, 0.001):
        assert news.acquire(timeout=30)
        assert not news.acquire(timeout=0.05)
        watched.began("call", "b", deadline=0.0)
        assert news.acquire(timeout=30)
        watched.ended("call", "a")
        watched.began("call", "a", deadline=0.0)  # another of the same name
        assert news.acquire(timeout=30)
    assert [sorted(ids) for ids in told] == [["a"], ["a", "b"], ["a", "b"]]
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def test_what_went_on_and_stands_again_is_told_again() -> None:
    times, looks, told = Clock(), threading.Semaphore(0), threading.Semaphore(0)

    def clock() -> float:
        looks.release()
        return times.now

    watched = Watchdog({"call": 10.0}, clock=clock)
    watched.began("call", "c")
    times.now = 20
    with watch(watched, lambda findings: told.release(), 0.001):
        assert told.acquire(timeout=30)
        watched.progress("call", "c")
        while looks.acquire(blocking=False):
            pass
        assert looks.acquire(timeout=30) and looks.acquire(timeout=30)  # one of them began after the progress
        assert not told.acquire(blocking=False)
        times.now = 40
        assert told.acquire(timeout=30)


def test_an_error_of_the_callback_is_logged_at_once_and_raised_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    called = threading.Event()

    def on_stuck(findings: Sequence[Finding]) -> None:
        called.set()
        raise OSError("no room for the report")

    running = watch(overdue("a"), on_stuck, 0.001)
    assert called.wait(30)
    with caplog.at_level(logging.ERROR), pytest.raises(OSError, match="no room"):
        running.stop()
    running.stop()


def test_a_real_deadlock_of_two_threads_is_named_and_their_stacks_shown() -> None:
    """Each holds what the other wants; the marks say so, and the stacks show where both stand."""
    locks = {name: threading.Lock() for name in ("left", "right")}
    watched, seen, shown = Watchdog({"worker": 0.05}), threading.Event(), []
    meet, give_up = threading.Barrier(2), threading.Event()

    def want(mine: str, other: str) -> None:
        watched.began("worker", mine)
        with locks[mine]:
            meet.wait(30)
            watched.waits("worker", mine, on=[("worker", other)])
            while not locks[other].acquire(timeout=0.02):
                if give_up.is_set():
                    return

    def on_stuck(findings: Sequence[Finding]) -> None:
        shown.append((findings, stacks()))
        seen.set()

    threads = [
        threading.Thread(target=want, args=pair, name=f"wants {pair[1]}")
        for pair in (("left", "right"), ("right", "left"))
    ]
    with watch(watched, on_stuck, 0.01):
        for thread in threads:
            thread.start()
        assert seen.wait(30)
        give_up.set()
        for thread in threads:
            thread.join(30)
    findings, text = shown[0]
    assert {(f.id, f.verdict) for f in findings} == {("left", Verdict.DEADLOCK), ("right", Verdict.DEADLOCK)}
    for name in ("wants left", "wants right"):
        assert "in want" in text.split(f"thread {name} (")[1].split("\nthread ")[0]
    assert "thread MainThread (" in text and "thread watchdog (" in text


def test_the_stack_of_a_task_goes_down_to_where_it_waits() -> None:
    async def bottom(event: asyncio.Event) -> None:
        await event.wait()

    async def top(event: asyncio.Event) -> None:
        await bottom(event)

    async def scenario() -> str:
        event = asyncio.Event()
        task = asyncio.create_task(top(event), name="the waiting one")
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        text = await asyncio.to_thread(stacks, loop)
        event.set()
        await task
        return text

    text = asyncio.run(scenario()).split("\ntask the waiting one (")[1]
    assert text.index("in top") < text.index("in bottom") < text.index("in wait")


class Compiled(Coroutine[Any, Any, None]):
    """A coroutine without a frame that awaits one with: as Ray runs the methods of an actor."""

    cr_frame = None

    def __init__(self, inner: Coroutine[Any, Any, None]) -> None:
        self.cr_await = inner.__await__()

    def send(self, value: Any) -> Any:
        return self.cr_await.send(value)

    def throw(self, *args: Any) -> Any:
        return self.cr_await.throw(*args)

    def close(self) -> None:
        self.cr_await.close()

    def __await__(self) -> Generator[Any, Any, None]:
        return self.cr_await


def test_the_stack_goes_through_what_is_compiled() -> None:
    async def method(event: asyncio.Event) -> None:
        await event.wait()

    async def scenario() -> str:
        event = asyncio.Event()
        task = asyncio.create_task(Compiled(method(event)), name="an actor's")
        await asyncio.sleep(0)
        text = stacks(asyncio.get_running_loop())
        event.set()
        await task
        return text

    text = asyncio.run(scenario()).split("\ntask an actor's (")[1]
    assert text.index("in method") < text.index("in wait")


def test_an_interval_is_above_zero() -> None:
    with pytest.raises(ValueError, match="interval=0"):
        watch(overdue(), lambda findings: None, 0)
