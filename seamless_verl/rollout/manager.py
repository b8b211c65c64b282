"""The rollout manager: the trainer's commands over a fleet of replicas, each of which may be repeated.

Invariants:
- Commands follow each other, but those for other replicas go on beside a load: `update_weights` is a command at its
  begin and at its end. Commands for a replica that loads wait; it may still be interrupted by its death.
- Before each command lost replicas are reconnected, so that none misses it.
- The effect of a command is in the snapshot before the command returns. A command that did not return is repeated, also
  to another process, and is then completed. Repeating one that returned gives the same result.
- If several data planes share the replicas, the first of them commands their engines. The others stop routing to a
  replica before the first stops it, and start again after the first has resumed it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from seamless_verl.errors import WeightsNotLoadedError
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.replica import DEAD, PAUSED, RELEASED, SERVING, STALE, SYNCING, ReplicaState, ReplicaView

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
COMMANDS = frozenset(
    {"pause", "resume", "quiesce", "release_memory", "reclaim_memory", "commit", "update_weights"}
    | {"begin_sync", "end_sync", "fail_sync", "lose"}
)
"""The commands that a trainer, or the first of several data planes, may execute."""
GIVEN_UP_ELSEWHERE = "the first data plane gave it up for being late"


@dataclass
class ReplicaSnapshot:
    """A replica after the last command. SERVING also stands for PAUSED; only then `version` is known.

    `lost`: it was not connected during that command, and missed it, but for the end of a release.
    """

    state: ReplicaState
    version: int | None = None
    lost: bool = False


@dataclass
class FleetSnapshot:
    """What another process needs to continue with a fleet, or this one after a lost connection.

    A replica's server reports the version of its weights and whether it is paused. The rest is here: the state that
    commands brought it to, and why it is paused. `training` replicas are paused because training has their device,
    `quiesced` ones because another data plane is about to stop them. `last_release` is the number of the last order to
    release memory, and its result. `abandoned` replicas are dead and not started again.
    """

    committed: int = 0
    training: set[str] = field(default_factory=set)
    quiesced: set[str] = field(default_factory=set)
    abandoned: set[str] = field(default_factory=set)
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

    def end_release(self, ids: Iterable[str]) -> None:
        """The memory of these, which are not connected, is back: one that returns is not taken for released."""
        for name in ids:
            if name in self.replicas and self.replicas[name].state is RELEASED:
                self.replicas[name].state = STALE

    def take_back(self, replica_id: str) -> None:
        """A replica returns that was given up: its weights are not known now. One that is released stays so."""
        stored = self.replicas.get(replica_id)
        if stored is not None and stored.state is not RELEASED:
            self.replicas[replica_id] = ReplicaSnapshot(STALE, lost=True)

    def restored_state(
        self, replica_id: str, version: int, paused: PauseMode | None
    ) -> tuple[ReplicaState, int | None]:
        """The state, with its version, of a replica whose server reports these weights and this pause.

        One that was not connected during a command may have missed an update, so its version counts only if it is the
        committed one. A connected replica may have an older version until its turn in an update.
        """
        stored = self.replicas.get(replica_id, ReplicaSnapshot(STALE))
        if stored.state is not SERVING:
            return stored.state, None
        if stored.version != version or (stored.lost and version != self.committed):
            return STALE, None
        return (SERVING if paused is None else PAUSED), version


def command(
    method: Callable[Concatenate[RolloutManager, Collection[str], P], Awaitable[T]],
) -> Callable[Concatenate[RolloutManager, Collection[str], P], Coroutine[Any, Any, T]]:
    """Makes a method a command for replicas: it runs alone, and again for those that came back meanwhile."""

    @wraps(method)
    async def run(manager: RolloutManager, ids: Collection[str], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await manager.execute(ids, lambda: method(manager, ids, *args, **kwargs))

    return run


class RolloutManager:
    """The commands of one data plane.

    Args:
        save: stores the snapshot where another process finds it.
        reconnect: reconnects to lost replicas; returns whether one came back.
        forward: executes a command, by name, in the other data planes; only the first one has others.
    """

    def __init__(
        self,
        fleet: Fleet,
        snapshot: FleetSnapshot,
        *,
        save: Callable[[], Awaitable[None]],
        reconnect: Callable[[], Awaitable[bool]],
        forward: Callable[..., Awaitable[object]],
    ) -> None:
        self.fleet, self.snapshot = fleet, snapshot
        self._save, self._reconnect, self._forward = save, reconnect, forward
        self._turn = asyncio.Condition()  # a command's; notified when loads have ended
        self.loading = set[str]()  # replicas from the begin of `update_weights` to its end
        self._returns = 0  # how often replicas were reconnected
        fleet.train_on(snapshot.training)

    @asynccontextmanager
    async def exclusive(self, ids: Iterable[str] = ()) -> AsyncGenerator[None, None]:
        """Runs one command at a time, not while one of `ids` loads, and saves the snapshot at its end.

        An empty block only reconnects replicas.
        """
        async with self._turn:
            await self._turn.wait_for(lambda: self.loading.isdisjoint(ids))
            await self._reconcile()
            try:
                yield
            finally:
                await self._save_snapshot()

    @command
    async def pause(self, ids: Collection[str], cut: Collection[str] = ()) -> dict[str, int]:
        """Training takes their devices: their calls freeze in the engine until `resume`, but are cut in replicas of
        `cut`.

        Returns how many calls each had.
        """
        self._train_on(self.snapshot.training | set(ids))
        loads = self._loads(ids)
        await self._forward("pause", ids)
        await self.fleet.pause(self.in_state(cut, SERVING), PauseMode.ABORT)
        await self._pause(ids)
        return loads

    @command
    async def resume(self, ids: Collection[str]) -> list[str]:
        """Their devices are free: paused replicas generate again; returns those that serve."""
        self._end_quiesce(ids)
        self._train_on(self.snapshot.training - set(ids))
        paused = self.in_state(ids, PAUSED)
        self._expect(paused)  # where one has not had its turn in an update
        await self.fleet.resume(paused)
        await self._forward("resume", ids)
        return self.in_state(ids, SERVING)

    @command
    async def quiesce(self, ids: Collection[str]) -> list[str]:
        """Stops routing to these replicas; the first data plane sends it to the others before it stops them."""
        self.snapshot.quiesced |= set(ids)
        await self._pause(ids)
        return self.in_state(ids, PAUSED)

    async def release_memory(self, ids: Collection[str], order: int = 0) -> dict[str, int]:
        """Cuts their calls, which continue elsewhere or wait; then their memory may be released.

        Returns the replicas that this command released, with how many calls each had; a repeated `order` above 0 the
        same.
        """
        released: dict[str, int] = {}

        async def run() -> dict[str, int]:
            if order > 0 and order == self.snapshot.last_release[0]:
                released.update(self.snapshot.last_release[1])
                return released
            loads = self._loads(ids)
            await self._forward("quiesce", ids)
            newly = await self.fleet.release(self.in_state(ids, SERVING, PAUSED, STALE))
            for name in newly:
                released.setdefault(name, loads.get(name, 0))
            await self._forward("release_memory", ids)
            self._end_quiesce(ids)
            return released

        def record() -> None:
            self.snapshot.last_release = (order, dict(released))

        return dict(await self.execute(ids, run, record))

    @command
    async def reclaim_memory(self, ids: Collection[str]) -> list[str]:
        """Their memory is back, with weights of unknown version."""
        self.snapshot.end_release(self.in_state(ids, DEAD))
        await self.fleet.reclaim(self.in_state(ids, RELEASED))
        await self._forward("reclaim_memory", ids)
        return self.in_state(ids, STALE)

    async def commit(self, version: int) -> None:
        """Allows the weights of `version` to be served; a replica serves older ones until its update.

        Raises ValueError where it is older than the committed one.
        """
        async with self.exclusive(self.fleet):
            self.fleet.commit(version)
            self._expect(self.fleet)
            await self._forward("commit", version)

    async def update_weights(self, ids: Collection[str], version: int, weights: Any) -> list[str]:
        """Loads the committed weights into these replicas; each pauses only while it loads.

        Returns those that then have the weights; they serve unless training has their device. A replica that cannot
        load is STALE, and its calls continue elsewhere. Raises ReplicaVersionError unless `version` is the committed
        one.
        """

        async with self.exclusive(ids):
            self.fleet.check_committed(ids, version)
            late = self._late()
            self.loading.update(ids)
        try:
            done, came_back = await self._load(ids, version, weights)
            while came_back:
                done, came_back = await self._load(ids, version, weights)
            return done
        finally:
            async with self._turn:
                self.loading.difference_update(ids)
                self._turn.notify_all()
                await self._lose_late(late)

    async def _load(self, ids: Collection[str], version: int, weights: Any) -> tuple[list[str], bool]:
        """Loads into those of these that can be reached, beside other commands.

        Returns those that then have the weights, and whether replicas came back meanwhile.
        """
        async with self.exclusive():
            returns = self._returns
            await self._forward("quiesce", ids)
            await self.fleet.fail_sync(self.in_state(ids, SYNCING))  # an earlier process did not see their loads end
            begun = self.in_state(ids, SERVING, PAUSED, STALE)
            self._expect_if_none_serves(begun)
            await self._forward("begin_sync", begun)
        reason = ""
        try:
            await self.fleet.update_weights(self.in_state(begun, SERVING, PAUSED, STALE), version, weights)
        except WeightsNotLoadedError as error:
            reason = str(error)
            logger.warning(reason)
        finally:
            async with self.exclusive():
                await self.fleet.fail_sync(self.in_state(begun, SYNCING))
                self._end_quiesce(begun)
                await self._pause(self.snapshot.training & set(begun))
                done = self._having(ids, version)
                await self._forward("end_sync", [name for name in begun if name in done], version)
                if failed := [name for name in begun if name not in done]:
                    await self._forward("fail_sync", failed, reason)
                await self._reconcile()
        return done, returns != self._returns

    @command
    async def begin_sync(self, ids: Collection[str]) -> list[str]:
        """Pauses replicas whose weights the trainer then replaces; their calls freeze in the engine."""
        await self._forward("quiesce", ids)
        await self._pause(ids)
        await self.fleet.begin_sync(self.in_state(ids, PAUSED, STALE))
        self._end_quiesce(ids)
        begun = self.in_state(ids, SYNCING)
        self._expect_if_none_serves(begun)
        await self._forward("begin_sync", begun)
        return begun

    @command
    async def end_sync(self, ids: Collection[str], version: int) -> list[str]:
        """Ends a sync: they have the committed weights, and serve unless training has their device.

        Raises ReplicaVersionError unless `version` is the committed one.
        """
        await self.fleet.end_sync(self.in_state(ids, SYNCING), version)
        self._end_quiesce(ids)
        await self._pause(self.snapshot.training & set(ids))
        await self._forward("end_sync", ids, version)
        return self.in_state(ids, SERVING, PAUSED)

    @command
    async def fail_sync(self, ids: Collection[str], reason: str = "") -> list[str]:
        """Ends a sync that failed: they are STALE, and their calls continue elsewhere."""
        logger.warning("%s could not load the weights: %s", ", ".join(ids), reason)
        await self.fleet.fail_sync(self.in_state(ids, SYNCING))
        self._end_quiesce(ids)
        await self._forward("fail_sync", ids, reason)
        return self.in_state(ids, STALE)

    async def lose(self, ids: Collection[str]) -> None:
        """Closes the connections to replicas that the first data plane gave up for being late; their calls continue
        elsewhere.

        Their engines may hang while their servers reply, so that nothing else would tell the others.
        """
        async with self._turn:
            for name in ids:
                self.fleet.lost(name, GIVEN_UP_ELSEWHERE)
            await self._save_snapshot()

    def in_state(self, ids: Collection[str] | Fleet, *states: ReplicaState) -> list[str]:
        """The ids of replicas in one of these states, in the order of `ids`."""
        found = {view.replica_id: view.state for view in self.fleet.view}
        return [name for name in dict.fromkeys(ids) if found.get(name) in states]

    def _having(self, ids: Collection[str], version: int) -> list[str]:
        """Those of these that have the weights of this version."""
        found = {view.replica_id for view in self.fleet.view if view.version == version}
        return [name for name in dict.fromkeys(ids) if name in found]

    async def execute(
        self, ids: Collection[str], run: Callable[[], Awaitable[T]], record: Callable[[], None] = lambda: None
    ) -> T:
        """Runs a command, and repeats it for replicas that came back meanwhile; `record` completes the snapshot."""
        async with self.exclusive(ids):
            late = self._late()
            result = await run()
            while await self._reconcile():
                result = await run()
            await self._lose_late(late)
            record()
            return result

    async def _lose_late(self, before: Collection[str]) -> None:
        """The other data planes lose what was given up since there were those `before`."""
        if late := [name for name in self._late() if name not in before]:
            await self._forward("lose", late)

    def _late(self) -> list[str]:
        """The replicas that were given up because they did not carry out a command in time."""
        return [name for name in self.in_state(self.fleet, DEAD) if self.fleet.is_late(name)]

    async def _reconcile(self) -> bool:
        """Reconnects to lost replicas and pauses those that must be paused; returns whether one came back."""
        came_back = await self._reconnect()
        self._returns += came_back
        if serving := self.in_state(self.snapshot.training | self.snapshot.quiesced, SERVING):
            await self._forward("quiesce", serving)  # the other data planes stop routing to them first
            await self._pause(serving)
        return came_back

    async def _save_snapshot(self) -> None:
        self.snapshot.update(self.fleet.view, self.fleet.committed)
        await self._save()

    async def _pause(self, ids: Collection[str]) -> None:
        await self.fleet.pause(self.in_state(ids, SERVING), PauseMode.KEEP)

    def _train_on(self, ids: set[str]) -> None:
        self.snapshot.training = ids
        self.fleet.train_on(ids)

    def _expect(self, ids: Iterable[str]) -> None:
        """New calls wait for those of these that will load, and then serve: nothing else keeps them from it."""
        held_back = self.snapshot.training | self.snapshot.quiesced
        self.fleet.expect([name for name in ids if name not in held_back])

    def _expect_if_none_serves(self, ids: Iterable[str]) -> None:
        """These load now, and are awaited: but not where others serve, among which a commit has said who is."""
        if not any(view.open for view in self.fleet.view):
            self._expect(ids)

    def _loads(self, ids: Collection[str]) -> dict[str, int]:
        """The number of calls of each replica."""
        return {view.replica_id: view.load for view in self.fleet.view if view.replica_id in ids}

    def _end_quiesce(self, ids: Collection[str]) -> None:
        """Ends the effect of `quiesce`: what it announced has happened."""
        self.snapshot.quiesced -= set(ids)
