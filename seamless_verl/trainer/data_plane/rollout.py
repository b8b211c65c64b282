"""The rollout manager: the fleet of the job's replicas, the calls that run on it, and its weight version.

It lives in the data plane's actor. The trainer commands it: which replicas stand still, which are being
given new weights, which version is committed. Whoever wants tokens calls `generate`, or comes through the
gateway; either way the call is carried over every pause, hand-over and death.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from seamless_verl.errors import ReplicaLostError
from seamless_verl.resources.watchdog import stacks
from seamless_verl.rollout.calls import Call, Calls
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.routing import PrefixAffinity
from seamless_verl.rollout.states import ReplicaState
from seamless_verl.rollout.wire import RemoteEngine
from seamless_verl.trainer.replica.server import ActorControl
from seamless_verl.trajectory.records import Finish

logger = logging.getLogger(__name__)
REPORT_TOKENS = 64  # an engine tells of so many tokens at a time where nobody reads along
REFITTED = (ReplicaState.SERVING, ReplicaState.PAUSED, ReplicaState.STALE)  # what may be given new weights


@dataclass
class Generated:
    """A whole generation: ids [N], logprobs [N] in nats, the weight version of each token [N], and why it ended."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""


class RolloutManager:
    """Owns the fleet and its calls. Replicas are named `replica-<rank>`; each has room for `capacity` calls."""

    def __init__(self, token: str, capacity: int, transition_s: float | None = None) -> None:
        self.token, self.capacity = token, capacity
        self.fleet = Fleet(policy=PrefixAffinity(), deadline_s=transition_s)
        self.calls = Calls(self.fleet)
        self.bell = Bell()
        self.held: set[str] = set()  # replicas whose device training has
        self.command = asyncio.Lock()  # commands follow each other, each seeing what the one before it left

    async def attach(self, replica_id: str, host: str, port: int, actor: Any) -> None:
        """A replica that listens; it serves after the next commit."""

        def lost(reason: str) -> None:
            logger.warning("replica %s is lost: %s", replica_id, reason)
            self.fleet.lost(replica_id, reason, engine=engine)  # a process in its place is not meant

        engine = await RemoteEngine.connect(host, port, token=self.token, replica_id=replica_id, on_lost=lost)
        self.fleet.add(replica_id, engine=engine, control=ActorControl(replica_id, actor), capacity=self.capacity)

    async def generate(self, name: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generated:
        """One call to its end. `sampling` are vLLM's fields; calls of one `name` like to be together.

        Raises:
            CallError: the call failed for good.
        """
        call = Call(name, array("i", prompt_ids), {"stream_interval": REPORT_TOKENS, **sampling}, key=name)
        done = Generated()
        async with aclosing(self.calls.stream(call)) as pieces:
            async for piece in pieces:
                done.ids.extend(piece.ids)
                done.logprobs.extend(piece.logprobs)
                done.versions.extend([piece.version] * len(piece.ids))
                if piece.error is not None:
                    raise piece.error
                done.finish = piece.finish or Finish.FAILED
        return done

    async def freeze(self, ids: Collection[str]) -> dict[str, int]:
        """Training has their devices: generation stops, and their calls freeze where they are, until `thaw`.

        Returns how many calls each of them has.
        """
        async with self.command:
            self.held |= set(ids)
            await self._freeze(ids)
            return self._calls(ids)

    async def thaw(self, ids: Collection[str]) -> list[str]:
        """Their devices are free: frozen replicas go on."""
        async with self.command:
            self.held -= set(ids)
            return await self.fleet.resume(self._of(ids, ReplicaState.PAUSED))

    async def part(self, ids: Collection[str]) -> dict[str, int]:
        """Their calls are cut, to go on elsewhere or to wait; then their memory may be taken.

        Returns those that parted, with how many calls each had.
        """
        parting = (ReplicaState.SERVING, ReplicaState.PAUSED, ReplicaState.STALE)
        async with self.command:
            calls = self._calls(ids)
            return {name: calls[name] for name in await self.fleet.lend(self._of(ids, *parting))}

    async def returned(self, ids: Collection[str]) -> list[str]:
        """Their memory is theirs again; their weights nobody vouches for."""
        async with self.command:
            return await self.fleet.reclaimed(self._of(ids, ReplicaState.LENT))

    async def commit(self, version: int) -> None:
        """The weights of `version` may be served from now on; what serves older ones goes on until it is refitted."""
        self.fleet.commit(version)

    async def begin_sync(self, ids: Collection[str]) -> list[str]:
        """Those that are to be given new weights, standing still: their calls are frozen in the engine."""
        async with self.command:
            await self._freeze(ids)
            return await self.fleet.begin_sync(self._of(ids, *REFITTED))

    async def synced(self, ids: Collection[str], version: int) -> list[str]:
        """They have the committed weights, and serve, unless training has their device."""
        async with self.command:
            synced = await self.fleet.synced(self._of(ids, ReplicaState.SYNCING), version)
            await self._freeze(self.held & set(synced))
            return synced

    async def sync_failed(self, ids: Collection[str], reason: str) -> None:
        """New weights did not reach them: their calls go on elsewhere."""
        logger.warning("%s could not be refitted: %s", ", ".join(ids), reason)
        async with self.command:
            await self.fleet.sync_failed(self._of(ids, ReplicaState.SYNCING))

    async def settle(self) -> dict[str, float]:
        """Metrics, after the books have been found to close and somebody to serve.

        Raises:
            IntegrityError: they do not close.
            ReplicaLostError: no replica serves, so that every call would wait for ever.
        """
        self.check_integrity()
        if not self._of(self.fleet, ReplicaState.SERVING) and not self._of(self.held, ReplicaState.PAUSED):
            raise ReplicaLostError(", ".join(self.fleet), f"no replica serves version {self.fleet.committed}")
        return self.metrics()

    def check_integrity(self) -> None:
        """Raises IntegrityError where the books of fleet and calls do not close."""
        self.fleet.check_integrity()
        self.calls.check_integrity()

    def metrics(self) -> dict[str, float]:
        return self.fleet.metrics() | self.calls.metrics()

    async def ring(self) -> None:
        """A group of sessions has come to its end."""
        self.bell.ring()

    async def rung(self, heard: int, timeout: float) -> int:
        """How often it was rung, as soon as that is more than `heard` or `timeout` seconds have passed."""
        return await self.bell.wait(heard, timeout)

    async def moved(self) -> float:
        """Tokens and replies so far: it grows as long as anything goes on here."""
        return sum(self.calls.metrics().values())

    async def where(self) -> str:
        """What stands where, for a person: replicas, calls, and every task of this process."""
        books = [*map(str, self.fleet.view), str({**self.calls.metrics(), "training has": sorted(self.held)})]
        return "\n".join([*books, stacks(asyncio.get_running_loop())])

    async def stop(self) -> None:
        """End what runs."""
        for replica_id in list(self.fleet):
            await self.fleet.remove(replica_id)

    async def _freeze(self, ids: Collection[str]) -> list[str]:
        return await self.fleet.pause(self._of(ids, ReplicaState.SERVING), PauseMode.KEEP)

    def _calls(self, ids: Collection[str]) -> dict[str, int]:
        return {view.replica_id: view.load for view in self.fleet.view if view.replica_id in ids}

    def _of(self, ids: Collection[str] | Fleet, *states: ReplicaState) -> list[str]:
        """Those of the ids in one of these states."""
        wanted = set(ids)
        return [view.replica_id for view in self.fleet.view if view.replica_id in wanted and view.state in states]


class Bell:
    """Counts; whoever has heard less is woken."""

    def __init__(self) -> None:
        self.count = 0
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self.count += 1
        self._rung.set()

    async def wait(self, heard: int, timeout: float) -> int:
        deadline = asyncio.get_running_loop().time() + timeout
        while self.count <= heard and (left := deadline - asyncio.get_running_loop().time()) > 0:
            self._rung.clear()
            try:
                await asyncio.wait_for(self._rung.wait(), left)
            except TimeoutError:
                break
        return self.count
