"""A data plane whose only replica is unreachable waits while it reconnects, and fails once it gives it up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from support.actor_death import KILLED, killed_for_memory
from support.local_plane import LocalDataPlane

from seamless_verl.data_plane.settings import PlaneSettings
from seamless_verl.rollout.observation import CacheUse
from seamless_verl.rollout.replica import DEAD, SERVING, STALE, ReplicaState
from seamless_verl.rollout.restarts import LossReason
from seamless_verl.tools.bench.stub_engine import StubEngine
from seamless_verl.transport import EngineServer, serve_engine

pytestmark = pytest.mark.integration
NAME, TOKEN = "replica-0", "the replica's"


class Actor:
    """The actor of a server whose engine has version 0, until it is dead."""

    dead = False
    error: Exception = ray.exceptions.ActorDiedError()  # of each call once it is dead

    def __init__(self) -> None:
        self.status = self.pause = self.resume = self.update_weights = SimpleNamespace(remote=self.reply)
        self.cache_use = SimpleNamespace(remote=self.used)

    async def reply(self, *_: Any) -> tuple[int, None]:
        if self.dead:
            raise self.error
        return 0, None

    async def used(self) -> CacheUse:
        await self.reply()
        return CacheUse()


@asynccontextmanager
async def data_plane(
    *, restarts: bool = False, transition_s: float | None = None
) -> AsyncIterator[tuple[LocalDataPlane, EngineServer, Actor]]:
    settings = PlaneSettings("local", TOKEN, restarts=restarts, transition_s=transition_s)
    plane, actor = LocalDataPlane(settings), Actor()
    server = await serve_engine(StubEngine(NAME), "127.0.0.1", 0, token=TOKEN, replica_id=NAME)
    await plane.start()
    await plane.attach(NAME, "127.0.0.1", server.port, actor)
    yield plane, server, actor
    if plane.failed is None:
        await plane.stop()
    await server.close()


def lose(plane: LocalDataPlane) -> None:
    """Loses the replica as a broken connection does."""
    plane.fleet.lost(NAME, "the network failed")


async def reconnected(plane: LocalDataPlane) -> None:
    assert plane.lost.reconnecting is not None
    await asyncio.wait({plane.lost.reconnecting})


async def test_a_replica_that_a_command_reconnects_is_not_given_up() -> None:
    async with data_plane() as (plane, _, _):
        command = asyncio.create_task(plane.execute("commit", 1))  # it reconnects before the background task does
        lose(plane)
        await reconnected(plane)
        await command
        assert plane.failed is None and [view.state for view in plane.fleet.view] != [DEAD]


async def test_giving_up_the_last_replica_fails_the_data_plane() -> None:
    async with data_plane() as (plane, server, actor):
        actor.dead = True
        await server.close()
        lose(plane)
        await reconnected(plane)
        assert plane.failed is not None
        assert "ReplicaLostError" in str(plane.failed) and "no replica is left" in str(plane.failed)


@asynccontextmanager
async def another_server() -> AsyncIterator[EngineServer]:
    """A server started in the place of a dead one."""
    server = await serve_engine(StubEngine(NAME), "127.0.0.1", 0, token=TOKEN, replica_id=NAME)
    yield server
    await server.close()


async def test_a_server_attached_in_the_place_of_a_dead_one_serves_after_an_update() -> None:
    async with data_plane(restarts=True) as (plane, server, actor), another_server() as other:
        await plane.execute("commit", 1)
        actor.dead = True
        await server.close()
        lose(plane)
        await reconnected(plane)
        assert plane.failed is None, "it waits for the replica's restart"
        (loss,) = (await plane.given_up()).values()
        assert loss.reason is LossReason.DIED and "its server is dead" in loss.detail
        await plane.checked_metrics()
        for _ in range(2):  # Ray repeats a call that had no reply
            await plane.attach(NAME, "127.0.0.1", other.port, Actor())
        assert await plane.given_up() == {} and states(plane) == [STALE]
        await plane.execute("update_weights", [NAME], 1, [])
        assert states(plane) == [SERVING] and plane.fleet.view[0].version == 1
        plane.check_integrity()


@pytest.mark.parametrize("listens", [True, False])
async def test_a_server_killed_for_memory_is_dead_and_the_reason_names_it(listens: bool) -> None:
    async with data_plane(restarts=True) as (plane, server, actor):
        actor.dead, actor.error = True, killed_for_memory()
        if not listens:
            await server.close()
        lose(plane)
        await reconnected(plane)
        assert plane.failed is None, "the run goes on, and the replica is started again"
        (loss,) = (await plane.given_up()).values()
        assert loss.reason is LossReason.DIED and loss.detail == f"its server is dead: {KILLED}"


async def test_a_server_takes_the_place_of_one_whose_loss_was_not_seen() -> None:
    async with data_plane() as (plane, _, _), another_server() as other:
        await plane.attach(NAME, "127.0.0.1", other.port, Actor())
        assert states(plane) == [STALE]
        await reconnected(plane)
        assert states(plane) == [STALE] and plane.failed is None and plane.lost.unconnected == set()


async def test_a_replica_that_is_late_is_given_up_with_its_reason() -> None:
    async with data_plane(restarts=True, transition_s=0.1) as (plane, _, actor):
        await plane.execute("commit", 1)
        actor.update_weights = SimpleNamespace(remote=lambda *_: asyncio.Event().wait())
        assert await plane.execute("update_weights", [NAME], 1, []) == []
        (loss,) = (await plane.given_up()).values()
        assert loss.reason is LossReason.LATE and "seamless.watchdog.transition_s" in loss.detail


@pytest.mark.parametrize("command", ["pause", "update_weights"])
async def test_a_server_that_hangs_does_not_hold_up_the_end(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with data_plane(transition_s=300.0) as (plane, _, actor):
        await plane.execute("commit", 1)
        await plane.execute("update_weights", [NAME], 1, [])
        asked, never, cleared = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def clear() -> None:
            cleared.set()

        async def hang(*_: Any) -> None:
            asked.set()
            await never.wait()

        monkeypatch.setattr(plane.store, "clear", clear)
        setattr(actor, command, SimpleNamespace(remote=hang))
        if running := command == "update_weights":  # also one that a command waits for
            loading = asyncio.create_task(plane.execute(command, [NAME], 1, []))
            await asked.wait()
        await asyncio.wait_for(plane.stop(), 10)
        assert cleared.is_set() and not list(plane.fleet)
        if running:
            await asyncio.wait({loading}, timeout=10)
            assert loading.done()


async def test_abandoning_the_last_replica_fails_the_data_plane() -> None:
    async with data_plane(restarts=True) as (plane, server, actor):
        actor.dead = True
        await server.close()
        lose(plane)
        await reconnected(plane)
        assert plane.failed is None
        await plane.abandon(NAME)
        await reconnected(plane)
        assert "no replica is left" in str(plane.failed)


def states(plane: LocalDataPlane) -> list[ReplicaState]:
    return [view.state for view in plane.fleet.view]
