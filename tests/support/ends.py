"""Actors that stop, and actors that do not, in plain python, so that their processes start at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray

from support.paths import child_environment


@contextmanager
def cluster() -> Iterator[None]:
    """A Ray whose workers find this module."""
    env = {"env_vars": child_environment()}
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=env)
    try:
        yield
    finally:
        ray.shutdown()


def started(kind: type) -> Any:
    """An actor of this class, ready."""
    actor = ray.remote(kind).options(num_cpus=0).remote()
    ray.get(actor.__ray_ready__.remote())
    return actor


def kill(actor: Any) -> None:
    ray.kill(actor)
    await_death(actor)


def await_death(actor: Any) -> None:
    """Returns when the actor is dead, which it is within a minute: after `ray.kill` it may still reply to a call."""
    deadline = time.monotonic() + 60
    with suppress(ray.exceptions.RayActorError):
        while time.monotonic() < deadline:
            ray.get(actor.__ray_ready__.remote(), timeout=60)
        raise AssertionError(f"{actor} lives")


class Ending:
    """An agent loop worker, or a replica's server, with the methods that stop them."""

    async def hold(self) -> None:
        time.sleep(600)  # noqa: ASYNC251 - as an agent does that never waits

    async def fail(self) -> None:
        raise ValueError("it cannot")

    async def stop(self) -> str:
        return "stopped"

    end = stop


class Failing(Ending):
    stop = end = Ending.fail  # type: ignore[assignment]


class Replica:
    """Answers `status` once it is released."""

    def __init__(self) -> None:
        self.asked, self.released = asyncio.Event(), asyncio.Event()

    async def status(self) -> str:
        self.asked.set()
        await self.released.wait()
        return "alive"

    async def when_asked(self) -> None:
        await self.asked.wait()

    async def release(self) -> None:
        self.released.set()


class RecoveringPlane:
    """A data plane with a call whose replica died: the call starts a recovery for all calls, and waits."""

    async def generate(self, replica: Any) -> None:
        self.recovery = asyncio.create_task(self.recover(replica))
        await asyncio.Event().wait()

    async def recover(self, replica: Any) -> str:
        return str(await replica.status.remote())

    async def recovered(self) -> str:
        return await self.recovery
