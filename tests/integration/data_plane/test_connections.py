"""A job whose only replica is out of reach waits while somebody seeks it, and fails once it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from seamless_verl.data_plane.actor import RolloutManager, RolloutSettings
from seamless_verl.errors import ReplicaLostError
from seamless_verl.rollout.replica_state import DEAD
from seamless_verl.testing.stub_engine import StubEngine
from seamless_verl.transport import EngineServer, serve_engine

pytestmark = pytest.mark.integration
NAME, TOKEN = "replica-0", "the door's"


class Shelf:
    """In memory."""

    def put(self, value: Any) -> None: ...

    def get(self) -> None: ...

    def clear(self) -> None: ...


class Manager(RolloutManager):
    """It is up, and keeps what it failed of."""

    def __init__(self) -> None:
        super().__init__(RolloutSettings("here", TOKEN), shelf=Shelf())  # type: ignore[arg-type]
        self.error: BaseException | None = None

    async def up(self) -> None: ...

    def fail(self, error: BaseException) -> None:
        self.error = error


class Actor:
    """Of a server whose engine stands still with version 0, until it is dead."""

    dead = False

    def __init__(self) -> None:
        self.standing = self.pause = self.resume = SimpleNamespace(remote=self.answer)

    async def answer(self, *_: Any) -> tuple[int, None]:
        if self.dead:
            raise ray.exceptions.ActorDiedError
        return 0, None


@asynccontextmanager
async def manager() -> AsyncIterator[tuple[Manager, EngineServer, Actor]]:
    here, actor = Manager(), Actor()
    door = await serve_engine(StubEngine(NAME), "127.0.0.1", 0, token=TOKEN, replica_id=NAME)
    here.go_on()
    await here.attach(NAME, "127.0.0.1", door.port, actor)
    yield here, door, actor
    await here.stop()
    await door.close()


def lose(here: Manager) -> None:
    """As its connection's reader does when that breaks."""
    here.fleet.lost(NAME, "the network was away")


async def mended(here: Manager) -> None:
    assert here.mending is not None
    await asyncio.wait({here.mending})


def test_who_is_sought_by_a_command_is_not_given_up() -> None:
    async def scenario() -> None:
        async with manager() as (here, _, _):
            command = asyncio.create_task(here.commit(1))  # it runs before whoever mends what is lost here
            lose(here)
            await mended(here)
            await command
            assert here.error is None and [view.state for view in here.fleet.view] != [DEAD]

    asyncio.run(scenario())


def test_the_last_that_is_given_up_ends_it() -> None:
    async def scenario() -> None:
        async with manager() as (here, door, actor):
            actor.dead = True
            await door.close()
            lose(here)
            await mended(here)
            assert isinstance(here.error, ReplicaLostError) and "none is left" in str(here.error)

    asyncio.run(scenario())
