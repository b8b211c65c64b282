"""The data plane with an eye on its calls: who has had a token since, and whether the servers are as the books say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import ray

from seamless_verl.data_plane.actor import DataPlane
from seamless_verl.data_plane.settings import PlaneSettings
from seamless_verl.rollout.call import Call, Calls
from seamless_verl.rollout.replica import DEAD, PAUSED, SERVING, SYNCING, ReplicaView
from seamless_verl.trajectory.records import TokenChunk

FROZEN = (PAUSED, SYNCING)  # their calls are theirs, and stand still
LOOK_S = 0.02


@dataclass
class Pulse:
    """When a call had its last token, and how many it has had in this life of the plane."""

    at: float
    tokens: int = 0


class WatchedCalls(Calls):
    """Calls with a pulse."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.pulses: dict[str, Pulse] = {}
        self.longest = 0.0  # seconds that a call was without a token

    async def stream(self, call: Call) -> AsyncGenerator[TokenChunk, None]:
        pulse = self.pulses[call.call_id] = Pulse(time.monotonic())
        try:
            async with aclosing(super().stream(call)) as pieces:
                async for piece in pieces:
                    now = time.monotonic()
                    self.longest = max(self.longest, now - pulse.at)
                    pulse.at, pulse.tokens = now, pulse.tokens + len(piece.ids)
                    yield piece
        finally:
            del self.pulses[call.call_id]


class WatchedPlane(DataPlane):
    """A plain class, made an actor where it is started."""

    def __init__(self, settings: PlaneSettings) -> None:
        super().__init__(settings)
        self.calls: WatchedCalls = WatchedCalls(self.fleet, grammars_resume=settings.grammars_resume)

    async def looked_at(self) -> tuple[dict[str, str], float]:
        """States by replica, and the longest wait so far, after the books have been found to close and to be true.

        Raises:
            IntegrityError, AssertionError: they are not.
        """
        await self.ensure_started()
        async with self.manager.exclusive(self.fleet):
            self.check_integrity()
            await asyncio.gather(*map(self.true_of, self.fleet.view))
            return {view.replica_id: view.state for view in self.fleet.view}, self.calls.longest

    async def true_of(self, view: ReplicaView) -> None:
        """Law 5 where it counts: in the server. No command changes anything meanwhile, but a replica may die."""
        server = self.connections.addresses[view.replica_id].server
        try:
            (version, paused), (requests, _) = await server.status.remote(), await server.left.remote()
        except ray.exceptions.RayActorError:
            return
        if self.manager.in_state([view.replica_id], view.state) == [] or view.state is DEAD:
            return  # it died meanwhile
        said = f"{view}: its server has version {version}, paused {paused}, {requests} requests"
        assert view.state not in (SERVING, PAUSED) or view.version == version, said
        assert view.state is not SERVING or paused is None, said
        assert view.state is not PAUSED or paused is not None, said
        assert view.state in (SERVING, PAUSED) or paused is not None or not requests, said  # a new one has none

    async def all_move(self) -> None:
        """Returns when each call that runs now has had a token, has ended, or is frozen; when nobody serves, too."""
        await self.ensure_started()
        before = {name: (pulse, pulse.tokens) for name, pulse in self.calls.pulses.items()}
        while self.serves() and len(self.unmoved(before)) > self.frozen():  # noqa: ASYNC110 - whoever asks bounds it
            await asyncio.sleep(LOOK_S)

    def unmoved(self, before: dict[str, tuple[Pulse, int]]) -> list[str]:
        here = self.calls.pulses
        return [name for name, (pulse, tokens) in before.items() if here.get(name) is pulse and pulse.tokens == tokens]

    def serves(self) -> bool:
        return any(view.state is SERVING for view in self.fleet.view)

    def frozen(self) -> int:
        """How many calls stand still with their replica."""
        return sum(view.load for view in self.fleet.view if view.state in FROZEN)
