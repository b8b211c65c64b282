"""The rollout manager: the trainer's commands over a fleet of replicas.

It pauses and resumes replicas, has them release and reclaim their memory, commits a weight version and updates the
weights of replicas. Each command may be repeated, also to another process that continues with the fleet.

Invariants:
- Commands follow each other, and one that loads weights lasts as long as the load; before each, lost replicas are
  connected to again, so that none misses one.
- A command is in the snapshot before it is answered. One that was not answered is repeated, and is completed from
  wherever it was; one that was answered and is repeated changes nothing and has the same answer.
- Where several data planes share the replicas, the first of them commands their engines. The others stop routing
  before it stops a replica, and route again after it has resumed one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from seamless_verl.errors import WeightsNotLoadedError
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.replica_state import DEAD, PAUSED, RELEASED, SERVING, STALE, SYNCING, ReplicaState
from seamless_verl.rollout.routing import ReplicaView

logger = logging.getLogger(__name__)
T = TypeVar("T")
COMMANDS = frozenset(
    {"pause", "resume", "quiesce", "release_memory", "reclaim_memory", "commit", "update_weights"}
    | {"begin_sync", "end_sync", "fail_sync"}
)
"""What a trainer, or the first of several data planes, may have executed."""


@dataclass
class ReplicaSnapshot:
    """A replica after the last command. SERVING also stands for PAUSED; only then `version` is known.

    `lost`: it was not connected during that command, of which it therefore knows nothing.
    """

    state: ReplicaState
    version: int | None = None
    lost: bool = False


@dataclass
class FleetSnapshot:
    """What must be known of a fleet to continue with it in another process, or after a connection was lost.

    A replica's server knows the version of its weights and whether it is paused. What it cannot know is here: which
    state it was brought to, and who wanted it paused. `training` replicas are paused because training has their
    device, `quiesced` ones because another data plane is about to stop them; `last_release` is the number of the
    last order to release memory, and its answer.
    """

    committed: int = 0
    training: set[str] = field(default_factory=set)
    quiesced: set[str] = field(default_factory=set)
    last_release: tuple[int, dict[str, int]] = (0, {})
    replicas: dict[str, ReplicaSnapshot] = field(default_factory=dict)

    def update(self, view: Iterable[ReplicaView], committed: int) -> None:
        """Records the state after a command."""
        self.committed = committed
        for replica in view:
            if replica.state is not DEAD:
                state = SERVING if replica.state is PAUSED else replica.state
                self.replicas[replica.replica_id] = ReplicaSnapshot(state, replica.version)
            elif replica.replica_id in self.replicas:
                self.replicas[replica.replica_id].lost = True

    def restored_state(
        self, replica_id: str, version: int, paused: PauseMode | None
    ) -> tuple[ReplicaState, int | None]:
        """The state, with its version, of a replica whose server reports these weights and this pause.

        A replica that was not connected while a version was committed has missed its update: then only the committed
        version counts as known. A connected one may still have an older version until its turn in an update.
        """
        known = self.replicas.get(replica_id, ReplicaSnapshot(STALE))
        if known.state is not SERVING:
            return known.state, None
        if known.version != version or (known.lost and version != self.committed):
            return STALE, None
        return (SERVING if paused is None else PAUSED), version


async def _nothing(*_: Any) -> bool:
    """No connections to restore, no other data planes."""
    return False


class RolloutManager:
    """The commands of one data plane.

    Args:
        save: keeps the snapshot where another process finds it.
        reconnect: connects to the replicas that were lost; whether one came back.
        forward: executes a command, by its name, in the other data planes; only the first has others.
    """

    def __init__(
        self,
        fleet: Fleet,
        snapshot: FleetSnapshot,
        *,
        save: Callable[[], None],
        reconnect: Callable[[], Awaitable[bool]] = _nothing,
        forward: Callable[..., Awaitable[object]] = _nothing,
    ) -> None:
        self.fleet, self.snapshot = fleet, snapshot
        self._save, self._reconnect, self._forward = save, reconnect, forward
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def exclusive(self) -> AsyncGenerator[None, None]:
        """One command at a time, saved at its end; an empty one only connects to lost replicas."""
        async with self._lock:
            await self._reconcile()
            try:
                yield
            finally:
                self.snapshot.update(self.fleet.view, self.fleet.committed)
                self._save()

    async def pause(self, ids: Collection[str]) -> dict[str, int]:
        """Training has their devices: generation stops, their calls freeze in the engine until `resume`.

        Returns how many calls each has.
        """

        async def run() -> dict[str, int]:
            self.snapshot.training |= set(ids)
            await self._forward("pause", ids)
            await self._pause(ids)
            return self._loads(ids)

        return await self._execute(run)

    async def resume(self, ids: Collection[str]) -> list[str]:
        """Their devices are free: paused replicas generate again; returns those that serve."""

        async def run() -> list[str]:
            self._end_quiesce(ids)
            self.snapshot.training -= set(ids)
            await self.fleet.resume(self.in_state(ids, PAUSED))
            await self._forward("resume", ids)
            return self.in_state(ids, SERVING)

        return await self._execute(run)

    async def quiesce(self, ids: Collection[str]) -> list[str]:
        """To one of the other data planes: stop routing to these, the first is about to stop them."""

        async def run() -> list[str]:
            self.snapshot.quiesced |= set(ids)
            await self._pause(ids)
            return self.in_state(ids, PAUSED)

        return await self._execute(run)

    async def release_memory(self, ids: Collection[str], order: int = 0) -> dict[str, int]:
        """Their calls are cut, to continue elsewhere or to wait; then their memory may be released.

        Returns those that this command released, with how many calls each had; an `order` above 0 that is repeated
        has the same answer.
        """
        repeated = order > 0 and order == self.snapshot.last_release[0]
        released: dict[str, int] = {}

        async def run() -> dict[str, int]:
            if repeated:
                return self.snapshot.last_release[1]
            loads = self._loads(ids)
            await self._forward("quiesce", ids)
            now = await self.fleet.release(self.in_state(ids, SERVING, PAUSED, STALE))
            for name in now:
                released.setdefault(name, loads.get(name, 0))
            await self._forward("release_memory", ids)
            self._end_quiesce(ids)
            return released

        def record() -> None:
            if not repeated:
                self.snapshot.last_release = (order, dict(released))

        return dict(await self._execute(run, record))

    async def reclaim_memory(self, ids: Collection[str]) -> list[str]:
        """They have their memory again, with weights of unknown version."""

        async def run() -> list[str]:
            await self.fleet.reclaim(self.in_state(ids, RELEASED))
            await self._forward("reclaim_memory", ids)
            return self.in_state(ids, STALE)

        return await self._execute(run)

    async def commit(self, version: int) -> None:
        """The weights of `version` may be served from now on; older ones are served until each replica's update.

        Raises:
            ValueError: an older version than the committed one.
        """
        async with self.exclusive():
            self.fleet.commit(version)
            await self._forward("commit", version)

    async def update_weights(self, ids: Collection[str], version: int, weights: Any) -> list[str]:
        """Loads the committed weights into these replicas; each pauses only while it loads.

        Returns those that have them then, and serve, unless training has their device. One that cannot load is
        STALE, and its calls continue elsewhere.

        Raises:
            ReplicaVersionError: they are not the committed ones.
        """

        async def run() -> list[str]:
            self.fleet.check_committed(ids, version)
            await self._forward("quiesce", ids)
            reachable = self.in_state(ids, SERVING, PAUSED, STALE)
            await self._forward("begin_sync", reachable)
            reason = await self._update_weights(reachable, version, weights)
            done = self.in_state(reachable, SERVING, PAUSED)
            await self._forward("end_sync", done, version)
            if failed := [name for name in reachable if name not in done]:
                await self._forward("fail_sync", failed, reason)
            return self.in_state(ids, SERVING, PAUSED)

        return await self._execute(run)

    async def begin_sync(self, ids: Collection[str]) -> list[str]:
        """Pauses those that are to be given new weights from outside; their calls freeze in the engine."""

        async def run() -> list[str]:
            await self._forward("quiesce", ids)
            await self._pause(ids)
            await self.fleet.begin_sync(self.in_state(ids, PAUSED, STALE))
            self._end_quiesce(ids)
            begun = self.in_state(ids, SYNCING)
            await self._forward("begin_sync", begun)
            return begun

        return await self._execute(run)

    async def end_sync(self, ids: Collection[str], version: int) -> list[str]:
        """They have the committed weights, and serve, unless training has their device.

        Raises:
            ReplicaVersionError: they are not the committed ones.
        """

        async def run() -> list[str]:
            await self.fleet.end_sync(self.in_state(ids, SYNCING), version)
            self._end_quiesce(ids)
            await self._pause(self.snapshot.training & set(ids))
            await self._forward("end_sync", ids, version)
            return self.in_state(ids, SERVING, PAUSED)

        return await self._execute(run)

    async def fail_sync(self, ids: Collection[str], reason: str = "") -> list[str]:
        """New weights did not reach them: their calls continue elsewhere."""
        logger.warning("%s could not load the weights: %s", ", ".join(ids), reason)

        async def run() -> list[str]:
            await self.fleet.fail_sync(self.in_state(ids, SYNCING))
            self._end_quiesce(ids)
            await self._forward("fail_sync", ids, reason)
            return self.in_state(ids, STALE)

        return await self._execute(run)

    def in_state(self, ids: Collection[str] | Fleet, *states: ReplicaState) -> list[str]:
        """Those of the ids in one of these states, in the order of the ids."""
        found = {view.replica_id: view.state for view in self.fleet.view}
        return [name for name in dict.fromkeys(ids) if found.get(name) in states]

    async def _execute(self, run: Callable[[], Awaitable[T]], record: Callable[[], None] = lambda: None) -> T:
        """Runs a command, again for replicas that were lost and came back meanwhile; `record` completes the
        snapshot."""
        async with self.exclusive():
            answer = await run()
            while await self._reconcile():
                answer = await run()
            record()
            return answer

    async def _reconcile(self) -> bool:
        """Connects to lost replicas, and pauses what is to be paused, whatever was missed; whether one came back."""
        back = await self._reconnect()
        if serving := self.in_state(self.snapshot.training | self.snapshot.quiesced, SERVING):
            await self._forward("quiesce", serving)  # the other data planes stop routing to them first
            await self._pause(serving)
        return back

    async def _update_weights(self, ids: Collection[str], version: int, weights: Any) -> str:
        """Why some of them are STALE now, if some are."""
        reason = ""
        try:
            await self.fleet.update_weights(self.in_state(ids, SERVING, PAUSED, STALE), version, weights)
        except WeightsNotLoadedError as error:
            reason = str(error)
            logger.warning(reason)
        await self.fleet.fail_sync(self.in_state(ids, SYNCING))
        self._end_quiesce(ids)
        await self._pause(self.snapshot.training & set(ids))
        return reason

    async def _pause(self, ids: Collection[str]) -> None:
        await self.fleet.pause(self.in_state(ids, SERVING), PauseMode.KEEP)

    def _loads(self, ids: Collection[str]) -> dict[str, int]:
        """Calls by replica."""
        return {view.replica_id: view.load for view in self.fleet.view if view.replica_id in ids}

    def _end_quiesce(self, ids: Collection[str]) -> None:
        """What `quiesce` announced has happened."""
        self.snapshot.quiesced -= set(ids)
