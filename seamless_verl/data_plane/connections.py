"""The data plane's connections to the replicas: controls, engines, and what finds out whether a replica replies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from seamless_verl.errors import ReplicaLostError, WeightsNotLoadedError
from seamless_verl.rollout.engine import EngineRequest, PauseMode
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.manager import FleetSnapshot
from seamless_verl.rollout.observation import CacheUse, CacheUseOfAll
from seamless_verl.rollout.replica import DEAD, STALE, ReplicaState
from seamless_verl.rollout.shared_samples import SharedSample
from seamless_verl.runtime.actor_death import ACTOR_GONE, death_reason
from seamless_verl.transport import RemoteEngine

logger = logging.getLogger(__name__)
SHARE_S = 1.0  # between two times at which each replica is given samples of others
PROBE_S = 5.0  # between two looks whether each replica replies, and how its cache is used


class ActorControl:
    """Pauses, resumes and loads the engine of a replica through its server's actor."""

    def __init__(self, replica_id: str, server: Any) -> None:
        self.replica_id, self.server = replica_id, server

    async def pause(self, mode: PauseMode) -> None:
        await self._await(self.server.pause.remote(mode.value))

    async def resume(self) -> None:
        await self._await(self.server.resume.remote())

    async def abort_all(self) -> None:
        await self.pause(PauseMode.ABORT)

    async def cache_use(self) -> CacheUse:
        """What the engine's KV cache has spared and cost since it listens."""
        found: CacheUse = await self._await(self.server.cache_use.remote())
        return found

    async def learn(self, samples: list[SharedSample]) -> None:
        """Gives its engine samples of other replicas, to draft from."""
        await self._await(self.server.learn.remote(samples))

    async def update_weights(self, version: int, weights: Any) -> None:
        try:
            await self._await(self.server.update_weights.remote(version, weights))
        except ray.exceptions.RayTaskError as error:
            raise WeightsNotLoadedError(self.replica_id, version, str(error)) from error

    async def _await(self, reply: Any) -> Any:
        try:
            return await reply
        except ACTOR_GONE as error:
            raise ReplicaLostError(self.replica_id, death_reason(error)) from error


class MirroredControl:
    """The control of a replica whose engine another data plane commands; its methods do nothing."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def abort_all(self) -> None: ...

    async def update_weights(self, version: int, weights: Any) -> None: ...


class DeadEngine:
    """The engine of a replica that is dead."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id

    async def generate(self, request: EngineRequest) -> Any:
        raise ReplicaLostError(self.replica_id, "it is dead")
        yield

    def close(self) -> None: ...


@dataclass(frozen=True)
class ReplicaAddress:
    """The address at which a replica's engine listens, and the actor of its server."""

    replica_id: str
    host: str
    port: int
    server: Any


class ReplicaConnections:
    """Owns the connections; `addresses` has all replicas that were ever attached, by name.

    A server that is connected to replies within `reply_s`.
    """

    def __init__(
        self,
        fleet: Fleet,
        snapshot: FleetSnapshot,
        addresses: dict[str, ReplicaAddress],
        *,
        token: str,
        capacity: int,
        mirror: bool,
        reply_s: float | None = None,
    ) -> None:
        self.fleet, self.snapshot, self.addresses = fleet, snapshot, addresses
        self.token, self.capacity, self.mirror, self.reply_s = token, capacity, mirror, reply_s
        self.cache_use = CacheUseOfAll()

    async def attach(self, address: ReplicaAddress) -> bool:
        """Connects to a replica that listens; False if it is connected already. It serves after its next update.

        A server at another address takes the place of the one that was attached before, which is lost.
        """
        name = address.replica_id
        if self.addresses.get(name) == address and name in self.fleet:
            return False
        engine = await self._connect(address)
        if name in self.fleet:
            self.fleet.lost(name, "another server takes its place")
        self.cache_use.begins_again(name)
        self.fleet.add(name, engine=engine, control=self._control(address), capacity=self.capacity)
        self.addresses[name] = address
        return True

    async def reconnect(self, name: str) -> str | None:
        """Tries to reconnect; returns the problem if it is to be tried again. ReplicaLostError: its server is dead."""
        try:
            async with asyncio.timeout(self.reply_s) as limit:  # commands wait meanwhile
                return await self._reconnect(self.addresses[name])
        except TimeoutError:
            if not limit.expired():
                raise
            return f"its server has not replied for {self.reply_s} s"

    async def _reconnect(self, address: ReplicaAddress) -> str | None:
        try:
            try:
                engine = await self._connect(address)
            except OSError as error:
                with suppress(ray.exceptions.ActorUnavailableError):  # it may live
                    await address.server.status.remote()
                return f"{type(error).__name__}: {error}"
            try:
                version, paused = await address.server.status.remote()
                mode = paused and PauseMode(paused)
                state, committed = self.snapshot.restored_state(address.replica_id, version, mode)
                if state is STALE and paused is None:  # weights are loaded only into a paused engine
                    await self._control(address).pause(PauseMode.KEEP)
            except BaseException:
                engine.close()
                raise
        except (*ACTOR_GONE, ReplicaLostError) as error:
            cause = error.__cause__ if isinstance(error, ReplicaLostError) else error  # a control's error has Ray's
            if isinstance(cause, ray.exceptions.ActorUnavailableError):  # it may live
                return str(cause)
            raise ReplicaLostError(address.replica_id, f"its server is dead: {death_reason(error)}") from error
        logger.warning("replica %s was unreachable and is %s again", address.replica_id, state)
        self._restore(address, engine, state, committed)
        return None

    def list_as_dead(self, name: str) -> None:
        """After a restart: the fleet has a replica that is given up."""
        if name not in self.fleet:
            self._restore(self.addresses[name], DeadEngine(name), DEAD, None)

    async def reaches(self, name: str, within_s: float) -> bool:
        """Whether its port and its actor reply in time: commands would wait for one of them that hangs."""
        try:
            async with asyncio.timeout(within_s):
                (await self._connect(self.addresses[name])).close()
                await self.addresses[name].server.status.remote()
        except (OSError, ray.exceptions.RayError):  # OSError is also that of the time limit
            return False
        return True

    async def watch(self) -> None:
        """Asks each replica from time to time how its cache is used; one that does not reply is lost."""

        async def look(control: ActorControl) -> None:
            self.cache_use.look(control.replica_id, await control.cache_use())

        while True:
            await asyncio.sleep(PROBE_S)  # nothing notifies of a process that hangs
            controls = [ActorControl(name, address.server) for name, address in self.addresses.items()]
            await asyncio.gather(*(self.fleet.probe(one.replica_id, partial(look, one)) for one in controls))

    async def share(self, samples_for: Callable[[str], list[SharedSample]]) -> None:
        """Gives each replica from time to time the samples of others that it is to draft from.

        What does not arrive is lost: whether a replica replies is for `watch` to find out.
        """

        async def give(control: ActorControl) -> None:
            with suppress(TimeoutError, ReplicaLostError, ray.exceptions.RayError):
                async with asyncio.timeout(PROBE_S):
                    await control.learn(samples_for(control.replica_id))

        while True:
            await asyncio.sleep(SHARE_S)  # so that a replica gets many tokens at once
            await asyncio.gather(*(give(ActorControl(name, one.server)) for name, one in self.addresses.items()))

    def _restore(self, address: ReplicaAddress, engine: Any, state: ReplicaState, version: int | None) -> None:
        self.fleet.add(
            address.replica_id,
            engine=engine,
            control=self._control(address),
            capacity=self.capacity,
            state=state,
            version=version,
        )

    def _control(self, address: ReplicaAddress) -> ActorControl | MirroredControl:
        return MirroredControl() if self.mirror else ActorControl(address.replica_id, address.server)

    async def _connect(self, address: ReplicaAddress) -> RemoteEngine:
        name, engines = address.replica_id, list[RemoteEngine]()

        def lost(reason: str) -> None:
            logger.warning("replica %s is unreachable: %s", name, reason)
            if engines:
                self.fleet.lost(name, reason, engine=engines[0])

        engine = await RemoteEngine.connect(address.host, address.port, token=self.token, replica_id=name, on_lost=lost)
        engines.append(engine)
        return engine
