"""Two data planes over the same replicas: the second one has connections of its own, and no command of the engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from support.local_plane import LocalDataPlane, ReplicaServer

from seamless_verl.data_plane import lost_replicas
from seamless_verl.data_plane.settings import PlaneSettings
from seamless_verl.rollout.replica import DEAD, PAUSED, RELEASED, SERVING, STALE, SYNCING, ReplicaState
from seamless_verl.tools.bench.stub_engine import StubEngine
from seamless_verl.transport import serve_engine

pytestmark = pytest.mark.integration
NAMES, TOKEN = ("replica-0", "replica-1"), "the replicas'"
FIRST = NAMES[0]
HOUR, LATE_S = 3600.0, 0.5


@asynccontextmanager
async def planes(**settings: Any) -> AsyncIterator[tuple[LocalDataPlane, LocalDataPlane, list[ReplicaServer]]]:
    """Both serve version 1; the first replica takes an hour for a token, the second one gives them at once."""
    first = LocalDataPlane(PlaneSettings("first", TOKEN, **settings))
    mirror = LocalDataPlane(PlaneSettings("mirror", TOKEN, mirror=True, **settings))
    servers = [ReplicaServer() for _ in NAMES]
    listeners = [
        await serve_engine(
            StubEngine(name, version=1, delay_s=HOUR if name == FIRST else 0.0),
            "127.0.0.1",
            0,
            token=TOKEN,
            replica_id=name,
        )
        for name in NAMES
    ]

    async def on_mirror(method: str, *arguments: Any) -> list[Any]:
        return [await getattr(mirror, method)(*arguments)]

    first._on_others = on_mirror  # type: ignore[method-assign]
    await mirror.start()
    await first.start()
    for name, listener, server in zip(NAMES, listeners, servers, strict=True):
        await first.attach(name, "127.0.0.1", listener.port, server)
    await first.execute("commit", 1)
    await first.execute("update_weights", NAMES, 1, [])
    assert states(first) == states(mirror) == [SERVING, SERVING]
    try:
        yield first, mirror, servers
    finally:
        await first.stop()
        await mirror.stop()
        for listener in listeners:
            await listener.close()


def states(plane: LocalDataPlane) -> list[ReplicaState]:
    return [view.state for view in plane.fleet.view]


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not reached():  # noqa: ASYNC110 - states notify of nothing outside of the fleet
            await asyncio.sleep(0.01)


@asynccontextmanager
async def unreachable(plane: LocalDataPlane, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """In the block this data plane has given up the first replica, which it cannot connect to."""
    monkeypatch.setattr(lost_replicas, "RECONNECT_S", 0.1)
    monkeypatch.setattr(lost_replicas, "RETURN_S", 0.1)

    async def no_route(address: Any) -> Any:
        raise OSError("no route")

    with monkeypatch.context() as broken:
        broken.setattr(plane.connections, "_connect", no_route)
        plane.fleet.lost(FIRST, "the network failed")
        await until(lambda: FIRST in plane.lost.given_up)
        yield


async def test_a_replica_that_the_second_one_alone_lost_serves_there_again_without_a_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer is told of it by the first one."""
    async with planes() as (first, mirror, _):
        async with unreachable(mirror, monkeypatch):
            pass
        await until(lambda: states(mirror)[0] is STALE)
        assert states(first) == [SERVING, SERVING]
        assert await first.taken_back() == [FIRST] and await first.taken_back() == []
        assert await first.execute("update_weights", [FIRST], 1, []) == [FIRST]
        assert states(mirror) == [SERVING, SERVING]


@pytest.mark.parametrize(
    ("begin", "end"),
    [("begin_sync", ["end_sync", [FIRST], 1]), ("release_memory", ["reclaim_memory", [FIRST]])],
)
async def test_one_that_the_second_one_lost_between_two_commands_serves_there_again(
    begin: str, end: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It missed the second command."""
    async with planes() as (first, mirror, _):
        await first.execute(begin, [FIRST])
        async with unreachable(mirror, monkeypatch):
            await first.execute(*end)
        await until(lambda: states(mirror)[0] is not DEAD)
        assert states(mirror) == [STALE, SERVING]
        if begin == "begin_sync":
            assert await first.taken_back() == [FIRST]
        assert await first.execute("update_weights", [FIRST], 1, []) == [FIRST]
        assert states(first) == states(mirror) == [SERVING, SERVING]


async def test_one_that_is_released_when_it_is_taken_back_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with planes() as (first, mirror, _):
        await first.execute("release_memory", [FIRST])
        async with unreachable(mirror, monkeypatch):
            pass
        await until(lambda: states(mirror)[0] is not DEAD)
        assert states(first) == states(mirror) == [RELEASED, SERVING]
        await first.execute("reclaim_memory", [FIRST])
        assert states(mirror)[0] is STALE
        assert await first.execute("update_weights", [FIRST], 1, []) == [FIRST]
        assert states(mirror) == [SERVING, SERVING]


async def test_calls_of_the_second_one_leave_an_engine_that_the_first_one_lost_in_a_load() -> None:
    """Its server replies, so that the second one would not notice by itself."""
    async with planes(transition_s=LATE_S) as (first, mirror, servers):
        call = None
        for number in range(64):  # until one prefers the slow replica
            call = asyncio.create_task(mirror.generate(f"call {number}", [1, 2], {"max_tokens": 5}))
            await until(lambda ended=call.done: ended() or mirror.fleet.view[0].load == 1)  # type: ignore[misc]
            if not call.done():
                break
        assert call is not None and mirror.fleet.view[0].load == 1
        never = asyncio.Event()
        servers[0].update_weights = SimpleNamespace(remote=lambda *_: never.wait())
        await first.execute("update_weights", [FIRST], 1, [])
        assert states(first)[0] is DEAD
        generated = await asyncio.wait_for(call, 30)
        assert len(generated.ids) == 5 and mirror.fleet.view[1].load == 0
        assert states(mirror)[0] is DEAD and FIRST in mirror.lost.given_up
        assert (await mirror.metrics())["fleet/given_up/unreachable"] == 1


async def test_a_load_that_hangs_delays_no_command_for_another_replica() -> None:
    """Nor a lost connection's return, nor the trainer's look, which finds that replicas load."""
    async with planes() as (first, mirror, servers):
        ended = asyncio.Event()
        second, reply = NAMES[1], servers[1].reply

        async def load(*_: Any) -> Any:
            await ended.wait()
            return await reply()

        servers[1].update_weights = SimpleNamespace(remote=load)
        await first.execute("commit", 2)
        loading = asyncio.create_task(first.execute("update_weights", [second], 2, []))
        await until(lambda: states(first)[1] is SYNCING)
        async with asyncio.timeout(20):
            await first.execute("pause", [FIRST])
            assert (states(first), states(mirror)) == ([PAUSED, SYNCING], [PAUSED, SYNCING])
            assert await first.execute("resume", [FIRST]) == [FIRST]
            assert list(await first.execute("release_memory", [FIRST], 1)) == [FIRST]
            await first.execute("reclaim_memory", [FIRST])
            assert (await first.checked_metrics())["fleet/syncing"] == 1
            assert await first.execute("update_weights", [FIRST], 2, []) == [FIRST]
        pause = asyncio.create_task(first.execute("pause", [second]))
        assert not (await asyncio.wait({pause, loading}, timeout=0.3))[0]
        ended.set()
        assert await loading == [second]
        await pause
        assert (states(first), states(mirror)) == ([SERVING, PAUSED], [SERVING, PAUSED])
