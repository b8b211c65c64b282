"""The actor between agents and replicas: the rollout manager, and with a gateway also its sessions and journal.

Owned state: all of these; the trainer commands it, agent loops generate and open and close sessions in it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from seamless_verl.trainer.data_plane.rollout import RolloutManager
from seamless_verl.trainer.data_plane.sessions import FinishedSession, Sessions, SessionSettings

__all__ = ["NAME", "DataPlane", "FinishedSession", "PlaneSettings"]
logger = logging.getLogger(__name__)
NAME = "seamless_data_plane"  # of the actor, in the job's namespace


@dataclass(frozen=True)
class PlaneSettings:
    """`token` opens the replicas' doors, `capacity` calls run at once on one of them, and one that does not stop or
    start within `transition_s` is given up; without `sessions` there is no gateway."""

    token: str
    capacity: int = 256
    transition_s: float | None = None
    sessions: SessionSettings | None = None


class DataPlane(RolloutManager):
    """A plain class, made an actor where it is started."""

    def __init__(self, settings: PlaneSettings) -> None:
        super().__init__(settings.token, settings.capacity, settings.transition_s)
        self.sessions = None if settings.sessions is None else Sessions(settings.sessions, self.calls)

    async def start(self) -> str | None:
        """Listen; returns the gateway's address, without a slash at its end, if there is one."""
        return None if self.sessions is None else await self.sessions.start()

    async def stop(self) -> None:
        """End what runs, and make all of it durable."""
        if self.sessions is not None:
            await self.sessions.stop()
        await super().stop()

    async def open(self, body: dict[str, Any]) -> dict[str, Any]:
        """A session; `body` as POST /admin/sessions takes it."""
        assert self.sessions is not None
        return await self.sessions.open(body)

    async def close(self, session_id: str, reason: str) -> FinishedSession:
        """End a session and take what it leaves."""
        assert self.sessions is not None
        return await self.sessions.close(session_id, reason, self.fleet.committed)

    async def settle(self) -> dict[str, float]:
        metrics = await super().settle()
        return metrics if self.sessions is None else metrics | await self.sessions.settle()
