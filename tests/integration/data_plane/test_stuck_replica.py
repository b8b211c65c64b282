"""A replica that serves and gives no tokens is in the data plane's waits, and is given up where its calls can go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.local_plane import LocalDataPlane, ReplicaServer

from seamless_verl.data_plane.settings import PlaneSettings
from seamless_verl.rollout.replica import DEAD, SERVING, ReplicaState
from seamless_verl.rollout.restarts import LossReason
from seamless_verl.runtime.waits import WaitKind
from seamless_verl.tools.bench.stub_engine import StubEngine
from seamless_verl.transport import serve_engine

pytestmark = pytest.mark.integration
TOKEN = "the replicas'"
HOUR = 3600.0


@asynccontextmanager
async def data_plane(*names: str, **settings: Any) -> AsyncIterator[tuple[LocalDataPlane, dict[str, StubEngine]]]:
    """A data plane whose replicas serve version 1, and are stuck: their next token comes in an hour."""
    plane = LocalDataPlane(PlaneSettings("local", TOKEN, **settings))
    engines = {name: StubEngine(name, version=1, delay_s=HOUR) for name in names}
    listeners = [
        await serve_engine(engine, "127.0.0.1", 0, token=TOKEN, replica_id=name) for name, engine in engines.items()
    ]
    await plane.start()
    for name, listener in zip(names, listeners, strict=True):
        await plane.attach(name, "127.0.0.1", listener.port, ReplicaServer())
    await plane.execute("commit", 1)
    await plane.execute("update_weights", names, 1, [])
    yield plane, engines
    await plane.stop()
    for listener in listeners:
        await listener.close()


def states(plane: LocalDataPlane) -> list[ReplicaState]:
    return [view.state for view in plane.fleet.view]


async def holder_of(plane: LocalDataPlane) -> str:
    """The replica that has the one call."""
    async with asyncio.timeout(60):
        while not (found := [view.replica_id for view in plane.fleet.view if view.load]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found[0]


async def test_the_calls_of_a_replica_that_is_given_up_continue_on_others() -> None:
    async with data_plane("replica-0", "replica-1") as (plane, engines):
        generating = asyncio.create_task(plane.generate("c", [1, 2, 3], {"max_tokens": 5}, "7"))
        stuck = await holder_of(plane)
        waits = {wait.name: wait for wait in (await plane.waits()).waits}
        assert waits["group 7"].on == ("call c",) and waits["call c"].on == (stuck,)
        assert (waits[stuck].kind, waits[stuck].on) == (WaitKind.REPLICA, ())
        (other,) = engines.keys() - {stuck}
        engines[other].delay_s = 0.0
        assert await plane.give_up(stuck, "it has given none of its calls a token for 43 s")
        generated = await asyncio.wait_for(generating, 60)
        assert len(generated.ids) == 5 and engines[other].produced == 5
        loss = (await plane.given_up())[stuck]
        assert loss.reason is LossReason.STUCK and loss.detail == "it has given none of its calls a token for 43 s"
        metrics = await plane.metrics()
        assert (metrics["fleet/given_up/stuck"], metrics["fleet/dead"], metrics["fleet/serving"]) == (1, 1, 1)
        assert plane.lost.unconnected == set(), "it would be connected to again, as one that the network lost"
        assert not await plane.give_up(other, "it is the last one") and states(plane).count(SERVING) == 1
        plane.check_integrity()


@pytest.mark.parametrize("restarts", [False, True])
async def test_the_last_replica_is_given_up_only_if_it_is_started_again(restarts: bool) -> None:
    async with data_plane("replica-0", restarts=restarts) as (plane, _):
        assert await plane.give_up("replica-0", "it gives no tokens") is restarts
        assert states(plane) == [DEAD if restarts else SERVING] and plane.failed is None
        assert await plane.give_up("replica-0", "again") is restarts
        assert (await plane.metrics())["fleet/given_up/stuck"] == restarts


async def test_a_command_that_does_not_end_is_in_the_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamless_verl.data_plane.waits.OWED_S", 0.0)
    async with data_plane("replica-0") as (plane, _):
        replies = asyncio.Event()
        plane.connections.addresses["replica-0"].server.pause.remote = lambda *_: replies.wait()
        pausing = asyncio.create_task(plane.execute("pause", ["replica-0"]))
        async with asyncio.timeout(60):
            while states(plane) != [ReplicaState.PAUSED]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        waits = {wait.name: wait for wait in (await plane.waits()).waits}
        assert waits["the command pause"].on == waits["replica-0"].on == ("the server of replica-0",)
        replies.set()
        await pausing
        assert "the command pause" not in {wait.name for wait in (await plane.waits()).waits}
