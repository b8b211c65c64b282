"""Actors that end, and that do not: of plain python, so that a process starts with them in no time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray


@contextmanager
def cluster() -> Iterator[None]:
    """A Ray whose workers find this module."""
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env})
    try:
        yield
    finally:
        ray.shutdown()


def started(kind: type) -> Any:
    """An actor of this class, ready."""
    actor = ray.remote(kind).options(num_cpus=0).remote()
    ray.get(actor.__ray_ready__.remote())
    return actor


class Ending:
    """An agent loop worker, or a replica's server, as those that end them see it."""

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
    """Answers when it is let."""

    def __init__(self) -> None:
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    async def standing(self) -> str:
        self.asked.set()
        await self.let.wait()
        return "standing"

    async def when_asked(self) -> None:
        await self.asked.wait()

    async def go_on(self) -> None:
        self.let.set()


class Mending:
    """As a plane whose call has seen a replica die: it sees to that for all, and goes on."""

    async def generate(self, replica: Any) -> None:
        self.mending = asyncio.create_task(self.mend(replica))
        await asyncio.Event().wait()

    async def mend(self, replica: Any) -> str:
        return str(await replica.standing.remote())

    async def mended(self) -> str:
        return await self.mending
