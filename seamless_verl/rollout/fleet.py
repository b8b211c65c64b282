"""The fleet: the replicas of a job and the operations on them; the slots that calls hold on them are in slots.py.

Invariants:
- An attached slot is on a replica that is SERVING, PAUSED or SYNCING.
- Operations on one replica follow each other; its death interrupts the running one.
- An operation that takes calls off a replica has the engine cut them first, so that all their tokens are on the way.
- Routing to a replica stops before it is paused, and starts again after it was resumed.
- A `keep` pause leaves calls attached: they continue at the resume, with new weights if there was a sync.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from functools import partial
from typing import Any

from seamless_verl.errors import ReplicaLostError, ReplicaVersionError
from seamless_verl.rollout.engine import Engine, PauseMode, ReplicaControl
from seamless_verl.rollout.replica import (
    DEAD,
    PAUSED,
    RELEASED,
    SERVING,
    STALE,
    SYNCING,
    VERSIONED,
    WITHOUT_CALLS,
    Replica,
    ReplicaState,
    ReplicaView,
    WaitingReplica,
    check_transition,
)
from seamless_verl.rollout.slots import Slots, check_equal


class Fleet:
    """The replicas. A replica whose control takes more than `deadline_s` is lost.

    `on_change` is called with a replica and the reason after each change of its state, and `on_late_reply` when the
    control of a replica that was lost for being late has replied after all. A waiting call is overtaken by no call of a
    prompt of its age or younger that came more than `overtaking` calls later.

    An operation takes ids, checks all of them before it changes one, and returns those on which it succeeded. A
    replica that dies meanwhile is DEAD and left out. An operation raises ReplicaStateError if the state of a replica
    does not allow it, and ValueError for an unknown id. Another error of a control is raised after the operation has
    ended on all replicas; nothing is routed to the replica that raised it.
    """

    def __init__(
        self,
        *,
        committed: int = 0,
        on_change: Callable[[ReplicaView, str], None] | None = None,
        overtaking: int = 256,
        deadline_s: float | None = None,
        on_late_reply: Callable[[str], None] | None = None,
    ) -> None:
        self.committed = committed
        self._on_change, self._deadline_s, self._on_late_reply = on_change, deadline_s, on_late_reply
        self._replicas: dict[str, Replica] = {}
        self._training = frozenset[str]()
        self.slots = Slots(self._replicas, overtaking)

    def __iter__(self) -> Iterator[str]:
        return iter(self._replicas)

    @property
    def view(self) -> tuple[ReplicaView, ...]:
        return self.slots.view

    def waiting_replicas(self) -> list[WaitingReplica]:
        return [replica.waiting(time.monotonic()) for replica in self._replicas.values()]

    def metrics(self) -> dict[str, float]:
        view = self.view
        states = {f"fleet/{state}": float(sum(r.state is state for r in view)) for state in ReplicaState}
        calls = {"fleet/attached": float(sum(r.load for r in view)), "fleet/waiting": float(self.slots.waiting)}
        return states | calls | self.slots.metrics()

    # Membership

    def commit(self, version: int) -> None:
        """Allows these weights to be served from now on; raises ValueError for an older version.

        Replicas with older ones take no more calls until their update, so that no prompt is answered from them.
        """
        if version < self.committed:
            raise ValueError(f"version={version} is older than the committed {self.committed}; commit a newer one")
        self.committed = version
        for replica in self._replicas.values():
            replica.outdated = replica.version not in (None, version)

    def train_on(self, ids: Collection[str]) -> None:
        """Training has the devices of these replicas, and of no others; those that are not in the fleet may come.

        They take no calls then, also while they serve for a moment, as after a load: calls that began there would be
        frozen for as long as training computes.
        """
        self._training = frozenset(ids)
        for replica in self._replicas.values():
            replica.training = replica.replica_id in self._training
        self.slots.grant_waiting()

    def expect(self, ids: Collection[str]) -> None:
        """These load the committed weights soon, and serve then: calls that prefer one may wait for it."""
        replicas = map(self._replica, dict.fromkeys(ids))
        self.slots.expect(one for one in replicas if one.state not in (DEAD, RELEASED) and not one.current)

    def add(
        self,
        replica_id: str,
        *,
        engine: Engine,
        control: ReplicaControl,
        capacity: int,
        state: ReplicaState | None = None,
        version: int | None = None,
    ) -> None:
        """Adds a replica, also in place of a dead one: STALE, or SERVING if it has the committed `version`.

        One that is reconnected, also by a later process, is in the `state` in which it was found.

        Raises:
            ValueError: the id is in use, the capacity is below 1, or the state does not go with the version.
            ReplicaVersionError: its version is not the committed one, or, of one that is reconnected, newer.
        """
        found = state or (STALE if version is None else SERVING)
        if (version is not None) != (found in VERSIONED):
            raise ValueError(f"replica {replica_id}: version={version} of one that is {found}")
        if version is not None and version != self.committed and (state is None or version > self.committed):
            raise ReplicaVersionError(replica_id, version, self.committed)
        if capacity < 1:
            raise ValueError(f"replica {replica_id}: capacity={capacity}; give room for one call at least")
        existing = self._replicas.get(replica_id)
        if existing is not None and existing.state is not DEAD:
            raise ValueError(f"replica {replica_id} exists already, {existing.state}; remove it or take another id")
        if existing is not None and existing.late is not None:
            existing.late.cancel()
        replica = Replica(replica_id, engine, control, capacity, found, version)
        replica.outdated, replica.training = version not in (None, self.committed), replica_id in self._training
        self._replicas[replica_id] = replica
        self._changed(replica, "added" if state is None else "restored")

    def lost(self, replica_id: str, reason: str, *, engine: Engine | None = None) -> None:
        """Makes a replica DEAD, from any state: its operation is interrupted, its calls continue elsewhere.

        Changes nothing if the replica is DEAD already or removed, or if its `engine` was replaced.
        """
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.state is not DEAD and engine in (None, replica.engine):
            self._lose(replica, reason)

    def is_late(self, replica_id: str) -> bool:
        """Whether the replica is dead because its control did not reply in time."""
        return self._replica(replica_id).late is not None

    async def remove(self, replica_id: str) -> None:
        """Takes a replica out and closes its engine; its calls continue elsewhere."""
        replica = self._replica(replica_id)
        async with replica.lock:
            if replica.state is not DEAD and await self._cut(replica):
                self._lose(replica, "removed")
        if replica.late is not None:
            replica.late.cancel()
        if self._replicas.get(replica_id) is replica:
            del self._replicas[replica_id]

    # Operations

    async def pause(self, ids: Collection[str], mode: PauseMode) -> list[str]:
        """SERVING to PAUSED."""
        return await self._each(ids, PAUSED, "pause", lambda replica: self._pause(replica, mode))

    async def resume(self, ids: Collection[str]) -> list[str]:
        """PAUSED to SERVING."""
        return await self._each(ids, SERVING, "resume", lambda replica: self._resume(replica, "resume", None))

    async def release(self, ids: Collection[str]) -> list[str]:
        """SERVING, PAUSED or STALE to RELEASED: its calls are cut, then its memory may be released."""

        async def run(replica: Replica) -> bool:
            return await self._cut(replica) and self._move(replica, RELEASED, "release")

        return await self._each(ids, RELEASED, "release", run, pauses_first=True)

    async def reclaim(self, ids: Collection[str]) -> list[str]:
        """RELEASED to STALE: its memory is back, it needs new weights."""
        return await self._each(ids, STALE, "reclaim")

    async def begin_sync(self, ids: Collection[str]) -> list[str]:
        """PAUSED or STALE to SYNCING; requests frozen by a `keep` pause stay in the engine."""
        return await self._each(ids, SYNCING, "begin_sync")

    async def update_weights(self, ids: Collection[str], version: int, weights: Any) -> list[str]:
        """SERVING, PAUSED or STALE to SERVING with the committed weights: one command pauses, loads and resumes.

        Raises:
            ReplicaVersionError: `version` is not the committed one; nothing changed.
            WeightsNotLoadedError: a replica could not load them, and is still SYNCING.
        """
        self.check_committed(ids, version)

        async def run(replica: Replica) -> bool:
            if replica.state is SERVING:
                self._move(replica, PAUSED, "pause")
            self._move(replica, SYNCING, "begin_sync")
            alive = await self._command(replica, replica.control.update_weights(version, weights))
            return alive and self._move(replica, SERVING, "end_sync", version)

        return await self._each(ids, SYNCING, "begin_sync", run, pauses_first=True)

    async def end_sync(self, ids: Collection[str], version: int) -> list[str]:
        """SYNCING to SERVING: it has these weights now; raises ReplicaVersionError unless `version` is committed."""
        self.check_committed(ids, version)
        return await self._each(ids, SERVING, "end_sync", lambda replica: self._resume(replica, "end_sync", version))

    async def fail_sync(self, ids: Collection[str]) -> list[str]:
        """SYNCING to STALE: its weights may be of two versions, so frozen calls are cut."""

        async def run(replica: Replica) -> bool:
            alive = await self._command(replica, replica.control.abort_all())
            return alive and self._move(replica, STALE, "fail_sync")

        return await self._each(ids, STALE, "fail_sync", run)

    async def probe(self, replica_id: str, question: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Asks a replica, unless an operation runs on it; one that does not reply in time is lost, as by an operation.

        Without this a replica that hangs between two operations keeps its calls.
        """
        replica = self._replicas.get(replica_id)
        if replica is None or replica.state is DEAD or replica.lock.locked():
            return
        async with replica.lock:
            await self._command(replica, question())

    def check_committed(self, ids: Collection[str], version: int) -> None:
        """Raises ReplicaVersionError unless `version` is the committed one."""
        for replica_id in ids if version != self.committed else ():
            raise ReplicaVersionError(replica_id, version, self.committed)

    def check_integrity(self) -> None:
        """Raises IntegrityError if slots, states and the queue contradict each other."""
        for replica in self._replicas.values():
            self._check(replica)
        self.slots.check_integrity()

    def _check(self, replica: Replica) -> None:
        name, load = f"replica {replica.replica_id}", len(replica.slots)
        check_equal(f"{name}: slots of another", 0, sum(slot.replica is not replica for slot in replica.slots))
        check_equal(f"{name}: calls above its capacity", 0, max(0, load - replica.capacity))
        check_equal(f"{name}: calls while {replica.state}", 0, load if replica.state in WITHOUT_CALLS else 0)
        check_equal(f"{name}: known version", replica.state in VERSIONED, replica.version is not None)
        check_equal(f"{name}: uncommitted versions", 0, max(0, (replica.version or 0) - self.committed))

    async def _pause(self, replica: Replica, mode: PauseMode) -> bool:
        self._move(replica, PAUSED, "pause")
        return await self._command(replica, replica.control.pause(mode))

    async def _resume(self, replica: Replica, operation: str, version: int | None) -> bool:
        with self.slots.resuming(replica):
            alive = await self._command(replica, replica.control.resume())
            return alive and self._move(replica, SERVING, operation, version)

    async def _cut(self, replica: Replica) -> bool:
        """Makes the replica cut its requests, from any state; returns whether it is alive."""
        if replica.state is SERVING:
            return await self._pause(replica, PauseMode.ABORT)
        if replica.state in (PAUSED, SYNCING):
            return await self._command(replica, replica.control.abort_all())
        return replica.state is not DEAD

    async def _command(self, replica: Replica, command: Coroutine[Any, Any, None]) -> bool:
        """Runs a control's command, which a death interrupts; returns whether the replica is alive after it."""
        replica.command, replica.commanded = asyncio.ensure_future(command), time.monotonic()
        try:
            done, _ = await asyncio.wait({replica.command}, timeout=self._deadline_s)
            if not done:
                replica.late, replica.command = replica.command, None
                replica.late.set_name("late command")
                replica.late.add_done_callback(partial(self._late_command_ended, replica))
                reason = f"{replica.state}: its control has not replied for {self._deadline_s} s"
                self.lost(replica.replica_id, reason, engine=replica.engine)
                return False
            if not replica.command.cancelled() and isinstance(loss := replica.command.exception(), ReplicaLostError):
                self.lost(replica.replica_id, loss.reason, engine=replica.engine)
            if replica.state is not DEAD:
                replica.command.result()
        finally:
            if replica.command is not None:
                replica.command.cancel()
                replica.command = None
        return replica.state is not DEAD

    def _late_command_ended(self, replica: Replica, command: asyncio.Task[Any]) -> None:
        """Whether it succeeded is not known to anybody who could act on it; that the replica replies, is."""
        if command.cancelled() or isinstance(command.exception(), ReplicaLostError):
            return
        if self._on_late_reply is not None and self._replicas.get(replica.replica_id) is replica:
            self._on_late_reply(replica.replica_id)

    async def _each(
        self,
        ids: Collection[str],
        goal: ReplicaState,
        operation: str,
        run: Callable[[Replica], Awaitable[bool]] | None = None,
        *,
        pauses_first: bool = False,
    ) -> list[str]:
        """Has all of these run this, or only change their state; returns those that did."""

        def check(replica: Replica) -> None:
            state = PAUSED if pauses_first and replica.state is SERVING else replica.state
            check_transition(replica.replica_id, state, goal, operation)

        async def run_locked(replica: Replica) -> bool:
            async with replica.lock:
                if replica.state is DEAD:
                    return False
                check(replica)
                return self._move(replica, goal, operation) if run is None else await run(replica)

        replicas = [self._replica(replica_id) for replica_id in dict.fromkeys(ids)]
        for replica in replicas:
            if replica.state is DEAD or not replica.lock.locked():
                check(replica)
        outcomes = await asyncio.gather(*map(run_locked, replicas), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [replica.replica_id for replica, outcome in zip(replicas, outcomes, strict=True) if outcome]

    def _replica(self, replica_id: str) -> Replica:
        if replica_id not in self._replicas:
            raise ValueError(f"replica={replica_id!r} is not in the fleet; there are {sorted(self._replicas)}")
        return self._replicas[replica_id]

    def _move(self, replica: Replica, state: ReplicaState, operation: str, version: int | None = None) -> bool:
        self.slots.dropped(replica.move(state, operation, version))
        self._changed(replica, operation)
        return True

    def _lose(self, replica: Replica, reason: str) -> None:
        self.slots.dropped(replica.move(DEAD, "lost"))
        if replica.command is not None:
            replica.command.cancel()
        replica.engine.close()
        self._changed(replica, reason)

    def _changed(self, replica: Replica, reason: str) -> None:
        if self._on_change is not None:
            self._on_change(replica.view, reason)
        self.slots.grant_waiting()
