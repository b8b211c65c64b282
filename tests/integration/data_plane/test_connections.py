"""A data plane whose only replica is unreachable waits while it reconnects, and fails once it gives it up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from support.local_plane import LocalDataPlane

from seamless_verl.data_plane.actor import PlaneSettings
from seamless_verl.rollout.replica_state import DEAD
from seamless_verl.testing.stub_engine import StubEngine
from seamless_verl.transport import EngineServer, serve_engine

pytestmark = pytest.mark.integration
NAME, TOKEN = "replica-0", "the replica's"


class Actor:
    """The actor of a server whose engine has version 0, until it is dead."""

    dead = False

    def __init__(self) -> None:
        self.status = self.pause = self.resume = SimpleNamespace(remote=self.reply)

    async def reply(self, *_: Any) -> tuple[int, None]:
        if self.dead:
            raise ray.exceptions.ActorDiedError
        return 0, None


@asynccontextmanager
async def data_plane() -> AsyncIterator[tuple[LocalDataPlane, EngineServer, Actor]]:
    plane, actor = LocalDataPlane(PlaneSettings("local", TOKEN)), Actor()
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
    assert plane.reconnecting is not None
    await asyncio.wait({plane.reconnecting})


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
