"""The time in which a session's calls waited is counted once, through queues, pauses and hand-overs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from support.rollout import World, call, check_whole, run, settle, world

from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.paused_time import PausedTime


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_calls_that_wait_together_are_counted_once() -> None:
    clock = Clock()
    times = PausedTime(clock)
    first, second = times.begin("s"), times.begin("s")
    first.set(True)
    clock.now += 3
    second.set(True)
    second.set(True)
    clock.now += 4
    first.set(False)
    clock.now += 5
    assert times.seconds("s") == 12, "it counts up to now"
    second.set(False)
    clock.now += 50
    assert times.seconds("s") == times.seconds("s") == 12
    assert times.seconds("another") == 0
    times.forget("s")
    first.set(True)
    assert times.seconds("s") == 0


def test_totals_begin_with_what_an_earlier_process_stored() -> None:
    clock = Clock()
    first, later = PausedTime(clock), PausedTime(clock)
    first.begin("s").set(True)
    first.begin("idle")
    clock.now += 3
    later.load_state_dict(first.state_dict())
    assert first.state_dict() == {"s": 3} and (later.total("s"), later.seconds("s")) == (3, 0)
    later.begin("s").set(True)
    clock.now += 2
    assert (later.total("s"), later.seconds("s")) == (5, 2) and later.state_dict() == {"s": 5}
    later.forget("s")
    assert later.total("s") == 0 and not later.state_dict()


async def timed_world_call(w: World, clock: Clock) -> asyncio.Task[None]:
    w.calls.paused_time = PausedTime(clock)
    wanted = replace(call(max_tokens=300, key="s"), timed=True)

    async def whole() -> None:
        check_whole(wanted, await run(w.calls, wanted))

    running = asyncio.create_task(whole())
    await settle()
    return running


async def test_a_pause_is_counted_for_calls_that_stay_and_for_calls_that_are_cut() -> None:
    clock = Clock()
    async with world() as w:
        running = await timed_world_call(w, clock)
        clock.now += 7
        await settle(5)
        assert w.calls.paused_time.seconds("s") == 7, "no replica had a slot"
        await w.start("a", tail=2)
        await settle(5)
        clock.now += 100
        assert w.calls.paused_time.seconds("s") == 7, "it generated"
        for mode, seconds in ((PauseMode.KEEP, 10), (PauseMode.ABORT, 20)):
            before = w.calls.paused_time.seconds("s")
            await w.fleet.pause(["a"], mode)
            clock.now += seconds
            await settle(5)
            assert not running.done()
            assert w.calls.paused_time.seconds("s") == before + seconds
            await w.stubs["a"].resume()
            await w.fleet.resume(["a"])
        await running
        clock.now += 1000
        assert w.calls.paused_time.seconds("s") == 37


async def test_calls_without_a_limited_agent_are_not_counted() -> None:
    async with world() as w:
        await w.start("a")
        wanted = call(max_tokens=9, key="s")
        check_whole(wanted, await run(w.calls, wanted))
        assert not w.calls.paused_time._clocks
