"""A replica's control through its server's actor, without what that server imports.

A plane's contact with the replicas: had once, and had again after a broken connection or the plane's own death.

A replica whose server lives is only out of reach: its door is knocked at until it opens. One whose server's actor
is dead stays dead.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import ray

from seamless_verl.errors import ReplicaLostError, WeightsNotLoadedError
from seamless_verl.rollout.engine import EngineRequest, PauseMode
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.manager import FleetSnapshot
from seamless_verl.rollout.replica_state import DEAD, STALE
from seamless_verl.transport import RemoteEngine


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


class MirroredControl:
    """The control of a replica whose engine another plane commands: it has been done, or is about to be."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def abort_all(self) -> None: ...

    async def refit(self, version: int, weights: Any) -> None: ...


logger = logging.getLogger(__name__)
SOUGHT_S = 30.0  # for so long a door is knocked at, while commands wait
KNOCK_S = 0.2  # between two knocks: a port tells nobody that it opens


@dataclass(frozen=True)
class ReplicaAddress:
    """Where a replica's engine is reached, and the actor of its server."""

    replica_id: str
    host: str
    port: int
    server: Any


class ReplicaConnections:
    """Owns the connections; `attachments` are all there ever were.

    `lost` are the replicas to be sought, `sought` those that a command seeks at this moment: neither is given up yet.
    """

    def __init__(
        self,
        fleet: Fleet,
        notes: FleetSnapshot,
        attachments: dict[str, ReplicaAddress],
        *,
        token: str,
        capacity: int,
        mirror: bool,
    ) -> None:
        self.fleet, self.notes, self.attachments = fleet, notes, attachments
        self.token, self.capacity, self.mirror = token, capacity, mirror
        self.lost, self.sought = set(attachments), set[str]()

    @property
    def missing(self) -> set[str]:
        """Dead in the books, and perhaps only there."""
        return self.lost | self.sought

    async def attach(self, one: ReplicaAddress) -> None:
        """A replica that listens; again changes nothing. It serves after the next commit.

        Raises:
            WireError: its door does not take us.
            OSError: it is not there.
        """
        if self.attachments.get(one.replica_id) == one and one.replica_id in self.fleet:
            return
        engine = await self._connect(one)
        self.fleet.add(one.replica_id, engine=engine, control=self._control(one), capacity=self.capacity)
        self.attachments[one.replica_id] = one

    async def seek(self) -> bool:
        """Have contact again with those that were lost, or give them up; whether there was one. Not twice at once."""
        if not self.lost:
            return False
        assert not self.sought, "commands follow each other"
        self.sought, self.lost = self.lost, set()
        try:
            known = [self.attachments[name] for name in self.sought if name in self.attachments]
            await asyncio.gather(*map(self._seek, known))
        finally:
            self.sought = set()
        return True

    async def _seek(self, one: ReplicaAddress) -> None:
        limit = asyncio.get_running_loop().time() + SOUGHT_S
        while (why := await self._knock(one)) is not None:
            if asyncio.get_running_loop().time() > limit:
                self._give_up(one, f"out of reach for {SOUGHT_S:g} s: {why}")
                return
            await asyncio.sleep(KNOCK_S)  # a replica that cannot be reached tells nobody when it can

    async def _knock(self, one: ReplicaAddress) -> str | None:
        """Try once; why it should be tried again, if it should."""
        try:
            engine = await self._connect(one)
            try:
                version, paused = await one.server.standing.remote()
                state, known = self.notes.state_of(one.replica_id, version, paused and PauseMode(paused))
                if state is STALE and paused is None:  # weights are loaded only into what stands still
                    await self._control(one).pause(PauseMode.KEEP)
            except BaseException:
                engine.close()
                raise
        except ray.exceptions.ActorUnavailableError as error:
            return str(error)
        except (ray.exceptions.RayActorError, ReplicaLostError) as error:
            self._give_up(one, f"its server is dead: {error}")
            return None
        except OSError as error:
            return await self._why(one, error)
        logger.warning("replica %s was out of reach and is %s again", one.replica_id, state)
        self._put(one, engine, state, known)
        return None

    async def _why(self, one: ReplicaAddress, error: OSError) -> str | None:
        """Why its door is shut; None when it will not open again."""
        try:
            await one.server.standing.remote()
        except ray.exceptions.ActorUnavailableError:
            pass
        except ray.exceptions.RayActorError as dead:
            self._give_up(one, f"its server is dead: {dead}")
            return None
        return f"{type(error).__name__}: {error}"

    def _give_up(self, one: ReplicaAddress, why: str) -> None:
        logger.error("replica %s is given up: %s", one.replica_id, why)
        if one.replica_id not in self.fleet:  # after a restart: it is counted among the dead
            self._put(one, DeadEngine(one.replica_id), DEAD, None)

    def _put(self, one: ReplicaAddress, engine: Any, state: Any, version: int | None) -> None:
        self.fleet.restore(
            one.replica_id,
            engine=engine,
            control=self._control(one),
            capacity=self.capacity,
            state=state,
            version=version,
        )

    def _control(self, one: ReplicaAddress) -> ActorControl | MirroredControl:
        return MirroredControl() if self.mirror else ActorControl(one.replica_id, one.server)

    async def _connect(self, one: ReplicaAddress) -> RemoteEngine:
        name, made = one.replica_id, list[RemoteEngine]()

        def lost(reason: str) -> None:
            logger.warning("replica %s is out of reach: %s", name, reason)
            if made:
                self.fleet.lost(name, reason, engine=made[0])

        made.append(await RemoteEngine.connect(one.host, one.port, token=self.token, replica_id=name, on_lost=lost))
        return made[0]


class DeadEngine:
    """The engine of a replica that is dead."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id

    async def generate(self, request: EngineRequest) -> Any:
        raise ReplicaLostError(self.replica_id, "it is dead")
        yield

    async def abort(self, request_id: str) -> None: ...

    def close(self) -> None: ...
