"""What a data plane says of its groups, sessions, calls and replicas, from real calls on engines without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.rollout import World, call, settle, world

from seamless_verl.data_plane import waits as module
from seamless_verl.data_plane.waits import PlaneState, plane_waits
from seamless_verl.rollout import call as calls_module
from seamless_verl.rollout import fleet as fleet_module
from seamless_verl.rollout import replica as replica_module
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.runtime.waits import TRAINER, Wait, WaitKind


class Time:
    """The clocks of what is tested."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Time]:
    clock = Time()
    for part in (calls_module, fleet_module, replica_module):
        monkeypatch.setattr(part, "time", clock)
    yield clock


@asynccontextmanager
async def running(w: World, *calls: Any) -> AsyncIterator[None]:
    """These calls run, and have the tokens that come at once."""

    async def read(one: Any) -> None:
        async for _ in w.calls.stream(one):
            pass

    tasks = [asyncio.create_task(read(one)) for one in calls]
    await settle()
    yield
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def found(w: World, **state: Any) -> dict[str, Wait]:
    return {wait.name: wait for wait in plane_waits(PlaneState(w.fleet, w.calls, **state)).waits}


async def test_a_replica_without_calls_that_serves_is_not_in_the_graph(clock: Time) -> None:
    async with world() as w:
        await w.start("a")
        clock.now += 900
        assert found(w) == {}


async def test_a_call_without_tokens_leads_to_its_replica(clock: Time) -> None:
    """Since it has its slot, however long the replica served and the session was open before."""
    async with world() as w:
        await w.start("a", delay_s=1000)
        clock.now += 900
        async with running(w, call("c9", key="s3", group="7")):
            clock.now += 43
            waits = found(w, uids={"s3": "7"})
            assert waits["group 7"].on == ("session s3",) and waits["session s3"].on == ("call c9",)
            assert (waits["call c9"].kind, waits["call c9"].on, waits["call c9"].waited_s) == (
                WaitKind.CALL,
                ("a",),
                43,
            )
            assert (waits["a"].kind, waits["a"].waited_s, waits["a"].on) == (WaitKind.REPLICA, 43, ())


async def test_a_call_waits_since_its_last_token(clock: Time) -> None:
    async with world() as w:
        engine = await w.start("a")
        async with running(w, call("c1", group="1", max_tokens=100_000)):
            clock.now += 10
            await settle()
            engine.delay_s = 1000
            await settle()
            clock.now += 43
            assert (found(w)["call c1"].waited_s, found(w)["a"].waited_s) == (43, 43)


async def test_a_new_call_does_not_hide_that_a_replica_gives_no_tokens(clock: Time) -> None:
    async with world() as w:
        await w.start("a", delay_s=1000)
        async with running(w, call("c1", group="1")):
            clock.now += 40
            async with running(w, call("c2", group="2")):
                clock.now += 3
                waits = found(w)
                assert (waits["a"].waited_s, waits["call c2"].waited_s) == (43, 3)


async def test_a_token_of_one_call_shows_that_the_replica_works(clock: Time) -> None:
    async with world() as w:
        engine = await w.start("a", delay_s=1000)
        async with running(w, call("c1", group="1")):
            clock.now += 43
            engine.delay_s = 0
            async with running(w, call("c2", group="2", max_tokens=10_000)):
                engine.delay_s = 1000
                await settle()
                waits = found(w)
                assert (waits["a"].waited_s, waits["call c1"].waited_s, waits["call c2"].waited_s) == (0, 43, 0)


async def test_what_is_paused_is_not_counted_as_a_call_without_tokens(clock: Time) -> None:
    async with world() as w:
        await w.start("a", delay_s=1000)
        async with running(w, call("c1", group="1")):
            clock.now += 5
            await w.fleet.pause(["a"], PauseMode.KEEP)
            clock.now += 43
            waits = found(w, training={"a"})
            assert (waits["call c1"].kind, waits["call c1"].on) == (WaitKind.HELD_CALL, ("a",))
            assert (waits["a"].kind, waits["a"].waited_s, waits["a"].on) == (WaitKind.IDLE_REPLICA, 43, (TRAINER,))
            assert "training has its device" in waits["a"].what
            await w.fleet.resume(["a"])
            clock.now += 2
            waits = found(w)
            assert (waits["call c1"].kind, waits["call c1"].waited_s, waits["a"].waited_s) == (WaitKind.CALL, 2, 2)


@pytest.mark.parametrize(("other", "on"), [("serving", ("b",)), ("paused", ("a", "b"))])
async def test_a_call_without_a_slot_waits_for_the_replicas_that_serve_else_for_all(
    clock: Time, other: str, on: tuple[str, ...]
) -> None:
    async with world() as w:
        for name in "ab":
            await w.start(name, delay_s=1000, capacity=1)
        async with running(w, call("c1", key="k1"), call("c2", key="k2"), call("c3", group="3")):
            await w.fleet.pause(["a"] if other == "serving" else ["a", "b"], PauseMode.KEEP)
            waits = found(w)
            assert (waits["call c3"].kind, waits["call c3"].on) == (WaitKind.HELD_CALL, on)


async def test_a_server_that_owes_a_reply_is_what_its_replica_and_the_command_wait_for(clock: Time) -> None:
    async with world() as w:
        engine = await w.start("a", delay_s=1000)
        replies = asyncio.Event()

        async def hang(mode: PauseMode) -> None:
            await replies.wait()

        engine.pause = hang  # type: ignore[method-assign]
        pausing = asyncio.create_task(w.fleet.pause(["a"], PauseMode.KEEP))
        await settle()
        clock.now += 1
        assert found(w)["a"].on == (TRAINER,), "its reply is on its way"
        clock.now += 42
        waits = found(w, commands={"pause": 44.0, "resume": 0.1})
        assert waits["a"].on == waits["the command pause"].on == ("the server of a",)
        assert waits["the server of a"] == Wait(WaitKind.SERVER, "the server of a", 43.0, what="has not replied")
        assert "the command resume" not in waits
        replies.set()
        await pausing


async def test_a_dead_replica_waits_for_nobody(clock: Time) -> None:
    async with world() as w:
        await w.start("a")
        await w.kill("a")
        assert (found(w)["a"].on, found(w)["a"].what) == ((), "has been dead")


async def test_of_a_group_the_session_is_said_that_has_waited_for_the_longest_time(clock: Time) -> None:
    async with world() as w:
        await w.start("a", delay_s=1000)
        uids = {"s1": "7", "s2": "7", "s3": "8"}
        async with running(w, call("c1", key="s1", group="7")):
            clock.now += 43
            waits = found(w, uids=uids, quiet_s={"s2": 50.0, "s3": 1.0})
            assert waits["group 7"].on == ("session s2",) and waits["group 8"].on == ("session s3",)
            assert waits["session s2"] == Wait(
                WaitKind.SESSION, "session s2", 50.0, what="has had no call of its agent"
            )
            assert found(w, uids=uids, quiet_s={"s2": 42.0})["group 7"].on == ("session s1",)


async def test_of_many_groups_those_are_said_that_have_waited_for_the_longest_time(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_GROUPS", 2)
    async with world() as w:
        quiet = {f"s{i}": float(i) for i in range(3)}
        reply = plane_waits(PlaneState(w.fleet, w.calls, quiet_s=quiet, uids={name: name for name in quiet}))
        assert not reply.whole and {wait.name for wait in reply.waits if wait.kind is WaitKind.GROUP} == {
            "group s1",
            "group s2",
        }
