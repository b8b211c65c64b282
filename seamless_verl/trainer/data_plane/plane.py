"""The actor between agents and replicas: the rollout manager, and with a gateway also its sessions and journal.

Owned state: all of these; the trainer commands it, agent loops generate and open and close sessions in it.

States: (made) STARTING -> UP -> FAILED. After a death Ray makes it again; it starts without being asked, since
agents ask nobody. What FAILED says why, to everybody who asks from then on, and is not started again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray

from seamless_verl.errors import JournalError, PlaneFailedError
from seamless_verl.trainer.collector import spare_imports
from seamless_verl.trainer.data_plane.rollout import RolloutManager, RolloutSettings
from seamless_verl.trainer.data_plane.sessions import FinishedSession, Sessions, SessionSettings
from seamless_verl.trainer.log import show_log

__all__ = ["DataPlane", "FinishedSession", "PlaneSettings"]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlaneSettings:
    """No `sessions`, no gateway."""

    rollout: RolloutSettings
    sessions: SessionSettings | None = None


class DataPlane(RolloutManager):
    """A plain class, made an actor where it is started."""

    def __init__(self, settings: PlaneSettings) -> None:
        show_log()
        super().__init__(settings.rollout)
        self.settings = settings
        self.sessions: Sessions | None = None
        self.starting: asyncio.Task[None] | None = None
        self.failed: PlaneFailedError | None = None
        ray.get_runtime_context().current_actor.start.remote()  # Ray calls nothing but this after a death

    async def start(self) -> str | None:
        """Listen; returns the gateway's address, without a slash at its end, if there is one."""
        await self.up()
        return None if self.sessions is None else self.sessions.gateway.url

    async def up(self) -> None:
        if self.starting is None:
            self.starting = asyncio.create_task(self._start(), name="start")
        await asyncio.shield(self.starting)
        if self.failed is not None:
            raise self.failed

    async def _start(self) -> None:
        try:
            again = self.go_on()
            if self.settings.sessions is not None:
                self.sessions = Sessions(self.settings.sessions, self.calls, on_failure=self.fail)
                await self.sessions.start(again=again)
            async with self.commands.told():  # from now on this is not its first life
                pass
            spare_imports()
        except Exception as error:  # whoever asks is told
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """It cannot go on: whoever waits or asks is told so."""
        if self.failed is None:
            self.failed = PlaneFailedError(self.settings.rollout.name, f"{type(error).__name__}: {error}")
            logger.critical("%s", self.failed, exc_info=error)
            self.bell.wake()

    async def stop(self) -> None:
        """End what runs, and make all of it durable."""
        await self.up()
        if self.sessions is not None:
            await self.sessions.stop()
            self.sessions = None
        await super().stop()

    async def open(self, body: dict[str, Any]) -> dict[str, Any]:
        """A session; `body` as POST /admin/sessions takes it."""
        async with self._journalling() as sessions:
            return await sessions.open(body)

    async def close(self, session_id: str, reason: str) -> FinishedSession:
        """End a session and take what it leaves; again gives the same, until it was handed over."""
        async with self._journalling() as sessions:
            return await sessions.close(session_id, reason, self.fleet.committed)

    async def handed(self, session_id: str, kept: bool = True) -> None:
        """What a closed session left has been taken over, or is left out: it is never given again."""
        async with self._journalling() as sessions:
            await sessions.handed(session_id, kept)

    @asynccontextmanager
    async def _journalling(self) -> AsyncGenerator[Sessions, None]:
        """Without its journal the plane can do nothing."""
        await self.up()
        assert self.sessions is not None
        try:
            yield self.sessions
        except JournalError as error:
            self.fail(error)
            raise

    async def metrics(self) -> dict[str, float]:
        metrics = await super().metrics()
        return metrics if self.sessions is None else metrics | await self.sessions.settle()
