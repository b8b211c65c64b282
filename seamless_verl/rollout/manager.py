"""What must be known of a fleet to go on with it: in another process after a death, or after contact was lost.

A server knows the version of its weights and whether it stands still. What it cannot know is noted here: whether
somebody vouches for those weights, and who wanted it to stand still.

What a trainer tells a fleet: each command may be told again, also to another process that goes on with the fleet.

Invariants:
- Commands follow each other, and one that loads weights lasts as long as the load; before each, contact with lost
  replicas is sought again, so that none misses one.
- A command is noted before it is answered. One that was not answered comes again, and is completed from wherever
  it was left; one that was answered and comes again changes nothing and has the same answer.
- Where several planes share the replicas, the first of them commands their engines. The others stop routing before
  it stops a replica, and route again after it has started one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from seamless_verl.errors import WeightsNotLoadedError
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.replica_state import DEAD, LENT, PAUSED, SERVING, STALE, SYNCING, ReplicaState
from seamless_verl.rollout.routing import ReplicaView


@dataclass
class ReplicaSnapshot:
    """A replica after the last command. SERVING also stands for PAUSED; only then `version` is known.

    `lost`: there was no contact with it during that command, of which it therefore has seen nothing.
    """

    state: ReplicaState
    version: int | None = None
    lost: bool = False


@dataclass
class FleetSnapshot:
    """`held` replicas stand still because training has their device, `still` ones because another plane is about to
    stop them; `parted` is the last order to part, and the answer to it."""

    committed: int = 0
    held: set[str] = field(default_factory=set)
    still: set[str] = field(default_factory=set)
    parted: tuple[int, list[str]] = (0, [])
    replicas: dict[str, ReplicaSnapshot] = field(default_factory=dict)

    def take(self, view: Iterable[ReplicaView], committed: int) -> None:
        """Note how things stand after a command."""
        self.committed = committed
        for one in view:
            if one.state is not DEAD:
                state = SERVING if one.state is PAUSED else one.state
                self.replicas[one.replica_id] = ReplicaSnapshot(state, one.version)
            elif one.replica_id in self.replicas:
                self.replicas[one.replica_id].lost = True

    def state_of(self, replica_id: str, version: int, paused: PauseMode | None) -> tuple[ReplicaState, int | None]:
        """The state, with its version, of a replica whose server says that it has these weights and is paused so.

        One that was out of reach while a version was committed would be refitted by nobody: only the committed
        version is vouched for then. One that was reached may be an older one whose turn in an update is yet to come.
        """
        noted = self.replicas.get(replica_id, ReplicaSnapshot(STALE))
        if noted.state is not SERVING:
            return noted.state, None
        if noted.version != version or (noted.lost and version != self.committed):
            return STALE, None
        return (SERVING if paused is None else PAUSED), version


logger = logging.getLogger(__name__)
Tell = Callable[..., Awaitable[object]]


async def _nothing(*_: Any) -> bool:
    """Nobody to mend or to tell."""
    return False


class Commands:
    """The commands of one plane.

    Args:
        save: keeps the notes where another process finds them.
        mend: seeks contact with the replicas that were lost; whether one came back.
        tell: gives a command, by its name, to the other planes; only the first plane has some.
    """

    def __init__(
        self,
        fleet: Fleet,
        notes: FleetSnapshot,
        *,
        save: Callable[[], None],
        mend: Callable[[], Awaitable[bool]] = _nothing,
        tell: Tell = _nothing,
    ) -> None:
        self.fleet, self.notes = fleet, notes
        self._save, self._mend, self._tell = save, mend, tell
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def told(self) -> AsyncGenerator[None, None]:
        """One command, noted at its end; an empty one mends what was lost."""
        async with self._lock:
            await self._met()
            try:
                yield
            finally:
                self.notes.take(self.fleet.view, self.fleet.committed)
                self._save()

    async def freeze(self, ids: Collection[str]) -> list[str]:
        """Training has their devices: generation stops, and their calls freeze where they are, until `thaw`."""

        async def obeyed() -> list[str]:
            self.notes.held |= set(ids)
            await self._tell("freeze", ids)
            await self._pause(ids)
            return self.of(ids, PAUSED)

        return await self._obey(obeyed)

    async def thaw(self, ids: Collection[str]) -> list[str]:
        """Their devices are free: frozen replicas go on."""

        async def obeyed() -> list[str]:
            self._release(ids)
            self.notes.held -= set(ids)
            await self.fleet.resume(self.of(ids, PAUSED))
            await self._tell("thaw", ids)
            return self.of(ids, SERVING)

        return await self._obey(obeyed)

    async def stand_still(self, ids: Collection[str]) -> list[str]:
        """To one of the other planes: the first is about to stop them."""

        async def obeyed() -> list[str]:
            self.notes.still |= set(ids)
            await self._pause(ids)
            return self.of(ids, PAUSED)

        return await self._obey(obeyed)

    async def part(self, ids: Collection[str], order: int = 0) -> list[str]:
        """Their calls are cut, to go on elsewhere or to wait; then their memory may be taken.

        Returns those that parted by this command; an `order` above 0 that comes again has the same answer.
        """
        parted: dict[str, None] = {}  # in order, each once
        again = order > 0 and order == self.notes.parted[0]

        async def obeyed() -> list[str]:
            if again:
                return self.notes.parted[1]
            await self._tell("stand_still", ids)
            parted.update(dict.fromkeys(await self.fleet.lend(self.of(ids, SERVING, PAUSED, STALE))))
            await self._tell("part", ids)
            self._release(ids)
            return list(parted)

        def noting() -> None:
            if not again:
                self.notes.parted = (order, list(parted))

        return await self._obey(obeyed, noting)

    async def returned(self, ids: Collection[str]) -> list[str]:
        """Their memory is theirs again; their weights nobody vouches for."""

        async def obeyed() -> list[str]:
            await self.fleet.reclaimed(self.of(ids, LENT))
            await self._tell("returned", ids)
            return self.of(ids, STALE)

        return await self._obey(obeyed)

    async def commit(self, version: int) -> None:
        """The weights of `version` may be served from now on; what serves older ones goes on until it is refitted.

        Raises:
            ValueError: an older version than the committed one.
        """
        async with self.told():
            self.fleet.commit(version)
            await self._tell("commit", version)

    async def refit(self, ids: Collection[str], version: int, weights: Any) -> list[str]:
        """Those that have the committed weights then, and serve, unless training has their device: each stands still
        only while it loads. One that cannot load is STALE, and its calls go on elsewhere.

        Raises:
            ReplicaVersionError: they are not the committed ones.
        """

        async def obeyed() -> list[str]:
            self.fleet.check_committed(ids, version)
            await self._tell("stand_still", ids)
            there = self.of(ids, SERVING, PAUSED, STALE)
            await self._tell("begin_sync", there)
            reason = await self._refit(there, version, weights)
            done = self.of(there, SERVING, PAUSED)
            await self._tell("synced", done, version)
            if failed := [name for name in there if name not in done]:
                await self._tell("sync_failed", failed, reason)
            return self.of(ids, SERVING, PAUSED)

        return await self._obey(obeyed)

    async def begin_sync(self, ids: Collection[str]) -> list[str]:
        """Those that are to be given new weights, standing still: their calls are frozen in the engine."""

        async def obeyed() -> list[str]:
            await self._tell("stand_still", ids)
            begun = await self._begin_sync(ids)
            await self._tell("begin_sync", begun)
            return begun

        return await self._obey(obeyed)

    async def synced(self, ids: Collection[str], version: int) -> list[str]:
        """They have the committed weights, and serve, unless training has their device.

        Raises:
            ReplicaVersionError: they are not the committed ones.
        """

        async def obeyed() -> list[str]:
            await self.fleet.synced(self.of(ids, SYNCING), version)
            self._release(ids)
            await self._pause(self.notes.held & set(ids))
            await self._tell("synced", ids, version)
            return self.of(ids, SERVING, PAUSED)

        return await self._obey(obeyed)

    async def sync_failed(self, ids: Collection[str], reason: str = "") -> list[str]:
        """New weights did not reach them: their calls go on elsewhere."""
        logger.warning("%s could not be refitted: %s", ", ".join(ids), reason)

        async def obeyed() -> list[str]:
            await self.fleet.sync_failed(self.of(ids, SYNCING))
            self._release(ids)
            await self._tell("sync_failed", ids, reason)
            return self.of(ids, STALE)

        return await self._obey(obeyed)

    async def _obey(
        self, obeyed: Callable[[], Awaitable[list[str]]], noting: Callable[[], None] = lambda: None
    ) -> list[str]:
        """A command, again for whom it lost on the way and met again; what is noted of it besides, at its end."""
        async with self.told():
            answer = await obeyed()
            while await self._met():
                answer = await obeyed()
            noting()
            return answer

    async def _met(self) -> bool:
        """Whether contact was had again with somebody; who is to stand still does, whatever was missed."""
        back = await self._mend()
        if serving := self.of(self.notes.held | self.notes.still, SERVING):
            await self._tell("stand_still", serving)  # the other planes stop routing to them first, as ever
            await self._pause(serving)
        return back

    def of(self, ids: Collection[str] | Fleet, *states: ReplicaState) -> list[str]:
        """Those of the ids in one of these states, in the order of the ids."""
        found = {view.replica_id: view.state for view in self.fleet.view}
        return [name for name in dict.fromkeys(ids) if found.get(name) in states]

    async def _refit(self, ids: Collection[str], version: int, weights: Any) -> str:
        """Why some of them are STALE now, if some are."""
        reason = ""
        try:
            await self.fleet.refit(self.of(ids, SERVING, PAUSED, STALE), version, weights)
        except WeightsNotLoadedError as error:
            reason = str(error)
            logger.warning(reason)
        await self.fleet.sync_failed(self.of(ids, SYNCING))
        self._release(ids)
        await self._pause(self.notes.held & set(ids))
        return reason

    async def _begin_sync(self, ids: Collection[str]) -> list[str]:
        await self._pause(ids)
        await self.fleet.begin_sync(self.of(ids, PAUSED, STALE))
        self._release(ids)
        return self.of(ids, SYNCING)

    async def _pause(self, ids: Collection[str]) -> None:
        await self.fleet.pause(self.of(ids, SERVING), PauseMode.KEEP)

    def _release(self, ids: Collection[str]) -> None:
        """What `stand_still` asked for has come."""
        self.notes.still -= set(ids)
