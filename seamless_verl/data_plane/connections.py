"""The data plane's connections to the replicas, and the reconnecting after a lost connection or its own restart.

A replica whose server's actor is alive is only unreachable: the data plane retries until `RECONNECT_S` have passed. A
replica whose server's actor is dead is given up at once. One that was given up stays dead until another server is
attached in its place, or until its own replies again (`take_back`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from seamless_verl.errors import ReplicaLostError, WeightsNotLoadedError, shorten
from seamless_verl.rollout.engine import EngineRequest, PauseMode
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.manager import FleetSnapshot
from seamless_verl.rollout.observation import CacheUse, CacheUseOfAll
from seamless_verl.rollout.replica import DEAD, STALE, ReplicaState
from seamless_verl.rollout.restarts import LossReason, ReplicaLoss
from seamless_verl.runtime.actor_death import ACTOR_GONE, death_reason
from seamless_verl.transport import RemoteEngine

logger = logging.getLogger(__name__)
RECONNECT_S = 30.0  # for all attempts, while commands wait
TAKEN_BACK = "fleet/taken_back"
LOSS_METRICS = frozenset({TAKEN_BACK, *(f"fleet/given_up/{reason}" for reason in LossReason)})
"""How many replicas were given up, by the reason, and how many of them were taken back."""
RETURN_S = 10.0  # between two looks for replicas that were given up as unreachable
PROBE_S = 5.0  # between two looks whether each replica replies, and how its cache is used
RETRY_S = 0.2  # between two attempts: nothing notifies of a port that opens


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

    async def abort(self, request_id: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ReplicaAddress:
    """The address at which a replica's engine listens, and the actor of its server."""

    replica_id: str
    host: str
    port: int
    server: Any


class ReplicaConnections:
    """Owns the connections; `addresses` has all replicas that were ever attached.

    `lost` replicas are to be reconnected, and `reconnecting` ones are being reconnected now. Neither is among those
    that were `given_up`. A server that is connected to replies within `reply_s`, or is given up. A replica that was
    taken back is `unproved` until it serves, and is not taken back again before: each attempt holds commands up.
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
        self.lost, self.reconnecting = set(addresses), set[str]()
        self.given_up: dict[str, ReplicaLoss] = {}
        self.unproved = set[str]()
        self.stuck: dict[str, str] = {}  # why a replica is about to be lost that gives no tokens
        self.counts = Counter(dict.fromkeys(LOSS_METRICS, 0))
        self.cache_use = CacheUseOfAll()

    @property
    def missing(self) -> set[str]:
        """Replicas that are dead in the fleet, but may be reconnected."""
        return self.lost | self.reconnecting

    async def attach(self, address: ReplicaAddress) -> None:
        """Connects to a replica that listens; a second call changes nothing. It serves after its next update.

        A server at another address takes the place of the one that was attached before, which is lost.
        """
        name = address.replica_id
        if self.addresses.get(name) == address and name in self.fleet:
            return
        engine = await self._connect(address)
        if name in self.fleet:
            self.fleet.lost(name, "another server takes its place")
        self.cache_use.begins_again(name)
        self.fleet.add(name, engine=engine, control=self._control(address), capacity=self.capacity)
        self.addresses[name] = address
        self.lost.discard(name)
        self.unproved.discard(name)
        self.given_up.pop(name, None)

    async def reconnect(self) -> bool:
        """Reconnects to the lost replicas, or gives them up; whether there was one. Never runs twice at once."""
        if not self.lost:
            return False
        assert not self.reconnecting, "commands follow each other"
        self.reconnecting, self.lost = self.lost, set()
        try:
            addresses = [self.addresses[name] for name in self.reconnecting if name in self.addresses]
            await asyncio.gather(*map(self._reconnect, addresses))
        finally:
            self.reconnecting = set()
        return True

    async def _reconnect(self, address: ReplicaAddress) -> None:
        limit = asyncio.get_running_loop().time() + RECONNECT_S
        while (problem := await self._try_in_time(address)) is not None:
            if asyncio.get_running_loop().time() > limit:
                detail = f"no connection for {RECONNECT_S:g} s: {problem}"
                self.give_up(address.replica_id, LossReason.UNREACHABLE, detail)
                return
            await asyncio.sleep(RETRY_S)  # nothing notifies of a server that listens again

    async def _try_in_time(self, address: ReplicaAddress) -> str | None:
        """`_try_once`, but for a server that hangs: commands wait meanwhile."""
        try:
            async with asyncio.timeout(self.reply_s) as limit:
                return await self._try_once(address)
        except TimeoutError:
            if not limit.expired():
                raise
            return f"its server has not replied for {self.reply_s} s"

    async def _try_once(self, address: ReplicaAddress) -> str | None:
        """Tries to reconnect; returns the problem if it is to be tried again."""
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
            self.give_up(address.replica_id, LossReason.DIED, f"its server is dead: {death_reason(error)}")
            return None
        logger.warning("replica %s was unreachable and is %s again", address.replica_id, state)
        self._restore(address, engine, state, committed)
        return None

    def give_up(self, name: str, reason: LossReason, detail: str) -> None:
        """Reconnects to this replica no more."""
        logger.error("replica %s is given up (%s): %s", name, reason, shorten(detail))
        self.counts[f"fleet/given_up/{reason}"] += 1
        self.given_up[name] = ReplicaLoss(reason, shorten(detail))
        if name not in self.fleet:  # after a restart: the fleet lists it as dead
            self._restore(self.addresses[name], DeadEngine(name), DEAD, None)

    def take_back(self, name: str, reason: LossReason) -> bool:
        """Reconnects to a replica that was given up for this reason, and replies again; whether it does.

        It is STALE unless its memory is released: a command that it missed, or did not carry out in time, may have
        changed its weights.
        """
        if name in self.unproved or name not in self.given_up or self.given_up[name].reason is not reason:
            return False
        logger.warning("replica %s replies again, and serves after its next weight update", name)
        self.counts[TAKEN_BACK] += 1
        del self.given_up[name]
        self.unproved.add(name)
        self.snapshot.take_back(name)
        self.lost.add(name)
        return True

    @property
    def unreachable(self) -> list[str]:
        """The replicas that were given up because they could not be connected to, and may be taken back."""
        found = [name for name, loss in self.given_up.items() if loss.reason is LossReason.UNREACHABLE]
        return [name for name in found if name not in self.unproved]

    async def await_return(self) -> list[str]:
        """Takes back unreachable ones as soon as one can be connected to; empty if none is unreachable any more."""
        while names := self.unreachable:
            await asyncio.sleep(RETURN_S)  # nothing notifies of a network that is whole again
            reached = [name for name in names if await self._reaches(self.addresses[name])]
            if taken := [name for name in reached if self.take_back(name, LossReason.UNREACHABLE)]:
                return taken
        return []

    async def watch(self) -> None:
        """Asks each replica from time to time how its cache is used; one that does not reply is lost."""

        async def look(control: ActorControl) -> None:
            self.cache_use.look(control.replica_id, await control.cache_use())

        while True:
            await asyncio.sleep(PROBE_S)  # nothing notifies of a process that hangs
            controls = [ActorControl(name, address.server) for name, address in self.addresses.items()]
            await asyncio.gather(*(self.fleet.probe(one.replica_id, partial(look, one)) for one in controls))

    async def _reaches(self, address: ReplicaAddress) -> bool:
        """Whether its port and its actor reply: commands would wait for one of them that hangs."""
        try:
            async with asyncio.timeout(RETURN_S):
                (await self._connect(address)).close()
                await address.server.status.remote()
        except (OSError, ray.exceptions.RayError):  # OSError is also that of the time limit
            return False
        return True

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
