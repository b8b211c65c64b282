"""The stack report: where threads and tasks are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator
from typing import Any

from seamless_verl.runtime.process import stack_report


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
