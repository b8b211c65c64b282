"""What each process sets up: the stack report, work that is done whole, and a clock that stands still with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.runtime.process import LATE_S, AwakeTime, WholeWork, stack_report


def test_every_thread_is_shown_by_name_where_it_stands() -> None:
    """Two threads, each of which holds what the other wants."""
    locks = {name: threading.Lock() for name in ("left", "right")}
    meet, give_up = threading.Barrier(3), threading.Event()

    def want(held: str, other: str) -> None:
        with locks[held]:
            meet.wait(30)
            while not locks[other].acquire(timeout=0.02):
                if give_up.is_set():
                    return

    threads = [
        threading.Thread(target=want, args=pair, name=f"wants {pair[1]}")
        for pair in (("left", "right"), ("right", "left"))
    ]
    for thread in threads:
        thread.start()
    meet.wait(30)
    text = stack_report()
    give_up.set()
    for thread in threads:
        thread.join(30)
    for name in ("wants left", "wants right"):
        assert "in want" in text.split(f"thread {name} (")[1].split("\nthread ")[0]
    assert "thread MainThread (" in text


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
        text = await asyncio.to_thread(stack_report, loop)
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
        text = stack_report(asyncio.get_running_loop())
        event.set()
        await task
        return text

    text = asyncio.run(scenario()).split("\ntask an actor's (")[1]
    assert text.index("in method") < text.index("in wait")


async def test_the_work_goes_on_when_its_caller_is_cancelled_and_can_be_waited_for() -> None:
    whole, release, done = WholeWork(), asyncio.Event(), list[str]()

    async def work() -> None:
        await release.wait()
        done.append("work")

    caller = asyncio.create_task(whole.do(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not done, "the caller leaves at once"
    release.set()
    await whole.ended()
    assert done == ["work"]
    await whole.ended()


async def test_a_caller_that_waits_gets_the_result_or_the_error() -> None:
    async def seven() -> int:
        return 7

    async def wrong() -> None:
        raise ValueError("wrong")

    whole = WholeWork()
    assert await whole.do(seven()) == 7
    with pytest.raises(ValueError, match="wrong"):
        await whole.do(wrong())


class Outside:
    """A clock that a test advances."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_stall_counts_for_no_longer_than_a_late_beat() -> None:
    outside = Outside()
    clock = AwakeTime(now=outside)
    began = clock()
    outside.now += 1.5
    assert clock() - began == pytest.approx(1.5)
    clock.beat()
    outside.now += 500.0
    assert clock() - began == pytest.approx(1.5 + LATE_S)
    clock.beat()
    assert clock() - began == pytest.approx(1.5 + LATE_S), "a beat does not move it"
    outside.now += 1.0
    assert clock() - began == pytest.approx(2.5 + LATE_S)


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans()), max_size=50))
def test_it_never_goes_back_nor_faster_than_time_and_loses_nothing_while_beats_are_in_time(
    moments: list[tuple[float, bool]],
) -> None:
    outside = Outside()
    clock = AwakeTime(now=outside)
    before, quiet, in_time = clock(), 0.0, True
    began = before
    for seconds, beats in moments:
        outside.now += seconds
        assert before <= clock() <= before + seconds + 1e-6
        before, quiet = clock(), quiet + seconds
        in_time = in_time and quiet <= LATE_S
        if beats:
            clock.beat()
            assert clock() == before
            quiet = 0.0
    if in_time:
        assert clock() - began == pytest.approx(outside.now - 1000.0)
