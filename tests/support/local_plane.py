"""A data plane outside of an actor, and a state store in memory."""

from __future__ import annotations

import asyncio
import concurrent.futures
from types import SimpleNamespace
from typing import Any

from seamless_verl.data_plane.actor import DataPlane
from seamless_verl.data_plane.settings import PlaneSettings
from seamless_verl.rollout.observation import CacheUse
from support.gateway import share_starts


class MemoryStore:
    """A state store for one process."""

    value: Any = None

    async def put(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value

    async def clear(self) -> None:
        self.value = None


class LocalDataPlane(DataPlane):
    """A data plane that its creator starts."""

    def __init__(self, settings: PlaneSettings) -> None:
        share_starts()
        super().__init__(settings, store=MemoryStore(), paused_store=MemoryStore())  # type: ignore[arg-type]

    def set_up_process(self) -> None: ...


class Handle:
    """The handle of a data plane's actor, whose methods run in this process."""

    def __init__(self, plane: Any) -> None:
        self.plane = plane

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self.call(name, arguments))

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        reply: concurrent.futures.Future[Any] = concurrent.futures.Future()

        async def run() -> None:
            try:
                reply.set_result(await getattr(self.plane, name)(*arguments))
            except Exception as error:  # as Ray raises it where the reply is awaited
                reply.set_exception(error)

        reply.task = asyncio.ensure_future(run())  # type: ignore[attr-defined]
        return SimpleNamespace(future=lambda: reply)


class ReplicaServer:
    """The actor of a replica's server, which replies at once, with version 1; a test replaces one of its methods."""

    def __init__(self, use: CacheUse | None = None) -> None:
        self.use = use or CacheUse()
        self.status = self.pause = self.resume = self.update_weights = SimpleNamespace(remote=self.reply)
        self.cache_use = SimpleNamespace(remote=self.used)

    async def reply(self, *_: Any) -> tuple[int, None]:
        return 1, None

    async def used(self) -> CacheUse:
        return self.use
