"""A replica's control through its server's actor, without what that server imports."""

from __future__ import annotations

from typing import Any

import ray

from seamless_verl.errors import ReplicaLostError, WeightsNotLoadedError
from seamless_verl.rollout.engine import PauseMode


class ActorControl:
    """Stops and starts the engine of the replica's server."""

    def __init__(self, replica_id: str, actor: Any) -> None:
        self.replica_id, self.actor = replica_id, actor

    async def pause(self, mode: PauseMode) -> None:
        await self._ask(self.actor.pause.remote(mode.value))

    async def resume(self) -> None:
        await self._ask(self.actor.resume.remote())

    async def abort_all(self) -> None:
        await self.pause(PauseMode.ABORT)

    async def refit(self, version: int, weights: Any) -> None:
        try:
            await self._ask(self.actor.refit.remote(version, weights))
        except ray.exceptions.RayTaskError as error:
            raise WeightsNotLoadedError(self.replica_id, version, str(error)) from error

    async def _ask(self, answer: Any) -> None:
        try:
            await answer
        except ray.exceptions.RayActorError as error:
            raise ReplicaLostError(self.replica_id, str(error)) from error


class Elsewhere:
    """The control of a replica whose engine another plane commands: it has been done, or is about to be."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def abort_all(self) -> None: ...

    async def refit(self, version: int, weights: Any) -> None: ...
