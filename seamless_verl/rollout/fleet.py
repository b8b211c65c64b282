"""The fleet: the replicas of a job, the slots that calls hold on them, and the operations on them.

Invariants:
- A call is granted a slot only on a replica that is SERVING, with weights that were committed, and has room.
- Leases granted = given back + dropped with their replica + attached; an attached one is with a replica that
  is SERVING, PAUSED or SYNCING.
- No call waits while a serving replica has room, except for its preferred replica, which is about to serve.
- Operations on one replica follow each other; its death interrupts the one that runs.
- What takes a replica's calls away first has the engine cut them, so that all tokens they produced are on their way.
- A replica stops being routed to before it is paused, and is routed to again after it was resumed.

A `keep` pause leaves calls attached: they continue at the resume, with new weights if there was a sync.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from typing import Any, TypeAlias

from seamless_verl.errors import IntegrityError, ReplicaLostError, ReplicaVersionError
from seamless_verl.rollout.engine import Engine, PauseMode, ReplicaControl
from seamless_verl.rollout.replica import Lease, Replica
from seamless_verl.rollout.replica_state import (
    DEAD,
    PAUSED,
    RELEASED,
    SERVING,
    STALE,
    SYNCING,
    VERSIONED,
    WITHOUT_CALLS,
    ReplicaState,
    check_transition,
)
from seamless_verl.rollout.routing import ReplicaView, RoutingPolicy
from seamless_verl.rollout.wait_queue import WaitQueue

OnChange: TypeAlias = Callable[[ReplicaView, str], None]  # the replica after the change, and why
RESUME_S = 1.0  # for a replica to resume, which takes milliseconds: calls wait for their preferred one no longer


class Fleet:
    """The replicas and the slots on them. A control that takes more than `deadline_s` loses its replica.

    `on_change` hears of each change of a replica's state. A waiting call is passed by none that came more than
    `overtaking` calls later.

    An operation takes ids, checks all of them before it touches one, and returns those for which it came true;
    one that dies meanwhile is DEAD and left out. It raises ReplicaStateError when a replica is in a state that
    does not allow it, and ValueError for an unknown id. Another error of a control is raised after
    the operation has ended on all replicas; the replica it came from is then not routed to.
    """

    def __init__(
        self,
        *,
        policy: RoutingPolicy,
        committed: int = 0,
        on_change: OnChange | None = None,
        overtaking: int = 256,
        deadline_s: float | None = None,
    ) -> None:
        self._policy, self._committed, self._on_change, self._deadline_s = policy, committed, on_change, deadline_s
        self._replicas: dict[str, Replica] = {}
        self._queue = WaitQueue(overtaking)
        self._granted = self._given_back = self._dropped = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._replicas)

    @property
    def committed(self) -> int:
        return self._committed

    @property
    def view(self) -> tuple[ReplicaView, ...]:
        return tuple(replica.view for replica in self._replicas.values())

    def metrics(self) -> dict[str, float]:
        view = self.view
        states = {f"fleet/{state}": float(sum(r.state is state for r in view)) for state in ReplicaState}
        calls = {"fleet/attached": float(sum(r.load for r in view)), "fleet/waiting": float(len(self._queue))}
        return states | calls | self._policy.metrics()

    # Membership

    def commit(self, version: int) -> None:
        """These weights may be served from now on; raises ValueError for an older version."""
        if version < self._committed:
            raise ValueError(f"version={version} is older than the committed {self._committed}; commit a newer one")
        self._committed = version

    def add(
        self, replica_id: str, *, engine: Engine, control: ReplicaControl, capacity: int, version: int | None = None
    ) -> None:
        """A new replica, or a process in place of a dead one; STALE unless it says it has the committed version.

        Raises:
            ValueError: the id is taken, or it has no room for a call.
            ReplicaVersionError: it comes with another version than the committed one.
        """
        if version is not None and version != self._committed:
            raise ReplicaVersionError(replica_id, version, self._committed)
        state = STALE if version is None else SERVING
        self._put(Replica(replica_id, engine, control, capacity, state, version), "added")

    def restore(
        self,
        replica_id: str,
        *,
        engine: Engine,
        control: ReplicaControl,
        capacity: int,
        state: ReplicaState,
        version: int | None,
    ) -> None:
        """A replica as it was found when it was connected to again, by this process or the next one.

        Raises:
            ValueError: the id is taken, it has no room for a call, or the state does not go with the version.
            ReplicaVersionError: its version is newer than the committed one.
        """
        if (version is not None) != (state in VERSIONED):
            raise ValueError(f"replica {replica_id}: version={version} of one that is {state}")
        if version is not None and version > self._committed:
            raise ReplicaVersionError(replica_id, version, self._committed)
        self._put(Replica(replica_id, engine, control, capacity, state, version), "restored")

    def lost(self, replica_id: str, reason: str, *, engine: Engine | None = None) -> None:
        """The replica is gone, from any state; the operation on it is interrupted, its calls continue elsewhere.

        News of a replica that is DEAD already, or removed, or about an `engine` that was replaced, changes nothing.
        """
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.state is not DEAD and engine in (None, replica.engine):
            self._lose(replica, reason)

    def timed_out(self, replica_id: str) -> bool:
        """Whether it is dead because its control did not answer in time."""
        return self._replica(replica_id).timed_out

    async def remove(self, replica_id: str) -> None:
        """Takes a replica out and closes its engine; its calls continue elsewhere."""
        replica = self._replica(replica_id)
        async with replica.lock:
            if replica.state is not DEAD and await self._cut(replica):
                self._lose(replica, "removed")
        if self._replicas.get(replica_id) is replica:
            del self._replicas[replica_id]

    # Slots

    async def acquire(self, key: str, ticket: int) -> Lease:
        """A slot on a serving replica, waiting for one if need be; `ticket` is the call's age in the queue."""
        if (lease := self._grant(key)) is not None:  # then no waiting call could have it
            return lease
        return await self._queue.wait(key, ticket)

    def _grant_waiting(self) -> None:
        """Slots to those that wait."""
        if len(self._queue) and self._has_room():
            preferred = self._policy.preferred(self.view)
            self._queue.grant_slots(self._grant, lambda key: self._fits(preferred(key)), self._has_room)

    def _has_room(self) -> bool:
        return any(map(self._fits, self._replicas))

    def _fits(self, replica_id: str | None) -> bool:
        return replica_id is not None and self._replicas[replica_id].view.has_room

    def _grant(self, key: str) -> Lease | None:
        chosen = self._policy.decide(self.view, key)
        if chosen is None:
            return None
        replica = self._replica(chosen)
        assert replica.view.has_room, f"{type(self._policy).__name__} chose {chosen}, which is {replica.view}"
        lease = Lease(replica, self._release_lease, replica.pauses)
        replica.leases.add(lease)
        self._granted += 1
        return lease

    def _release_lease(self, lease: Lease) -> None:
        if lease.attached:
            lease.replica.leases.remove(lease)
            self._given_back += 1
            self._grant_waiting()

    # Operations

    async def pause(self, ids: Collection[str], mode: PauseMode) -> list[str]:
        """SERVING to PAUSED."""

        async def paused(replica: Replica) -> bool:
            self._move(replica, PAUSED, "pause")
            return await self._command(replica, replica.control.pause(mode))

        return await self._each(ids, PAUSED, "pause", paused)

    async def resume(self, ids: Collection[str]) -> list[str]:
        """PAUSED to SERVING."""
        return await self._each(ids, SERVING, "resume", lambda replica: self._resume(replica, "resume", None))

    async def release(self, ids: Collection[str]) -> list[str]:
        """SERVING, PAUSED or STALE to RELEASED: its calls are cut, then its memory may go."""

        async def released(replica: Replica) -> bool:
            return await self._cut(replica) and await self._enter(replica, RELEASED, "release")

        return await self._each(ids, RELEASED, "release", released, pauses_first=True)

    async def reclaim(self, ids: Collection[str]) -> list[str]:
        """RELEASED to STALE: its memory is back, it needs new weights."""
        return await self._each(ids, STALE, "reclaim", lambda replica: self._enter(replica, STALE, "reclaim"))

    async def begin_sync(self, ids: Collection[str]) -> list[str]:
        """PAUSED or STALE to SYNCING; requests frozen by a `keep` pause stay in the engine."""
        return await self._each(ids, SYNCING, "begin_sync", lambda replica: self._enter(replica, SYNCING, "begin_sync"))

    async def update_weights(self, ids: Collection[str], version: int, weights: Any) -> list[str]:
        """SERVING, PAUSED or STALE to SERVING with the committed weights: one command pauses, loads and resumes.

        Raises:
            ReplicaVersionError: they are not the committed ones; nothing changed.
            WeightsNotLoadedError: of a replica that could not load them, which is SYNCING still.
        """
        self.check_committed(ids, version)

        async def updated(replica: Replica) -> bool:
            if replica.state is SERVING:
                self._move(replica, PAUSED, "pause")
            self._move(replica, SYNCING, "begin_sync")
            alive = await self._command(replica, replica.control.update_weights(version, weights))
            return alive and await self._enter(replica, SERVING, "end_sync", version)

        return await self._each(ids, SYNCING, "begin_sync", updated, pauses_first=True)

    async def end_sync(self, ids: Collection[str], version: int) -> list[str]:
        """SYNCING to SERVING: it has these weights now.

        Raises:
            ReplicaVersionError: they are not the committed ones; the replicas are SYNCING still.
        """
        self.check_committed(ids, version)
        return await self._each(ids, SERVING, "end_sync", lambda replica: self._resume(replica, "end_sync", version))

    async def fail_sync(self, ids: Collection[str]) -> list[str]:
        """SYNCING to STALE: its weights may be of two versions, so frozen calls are cut."""

        async def spoiled(replica: Replica) -> bool:
            alive = await self._command(replica, replica.control.abort_all())
            return alive and await self._enter(replica, STALE, "fail_sync")

        return await self._each(ids, STALE, "fail_sync", spoiled)

    def check_committed(self, ids: Collection[str], version: int) -> None:
        """Raises ReplicaVersionError."""
        for replica_id in ids if version != self.committed else ():
            raise ReplicaVersionError(replica_id, version, self.committed)

    def check_integrity(self) -> None:
        """Raises IntegrityError where leases, states and the queue contradict each other."""
        attached = sum(len(replica.leases) for replica in self._replicas.values())
        _equal("leases given back + dropped + attached", self._granted, self._given_back + self._dropped + attached)
        for replica in self._replicas.values():
            self._check(replica)
        preferred, starting = self._policy.preferred(self.view), {r.replica_id for r in self.view if r.starting}
        idle = [key for key in self._queue.keys if preferred(key) not in starting] if self._has_room() else []
        _equal("calls that wait while there is room", 0, len(idle))

    def _check(self, replica: Replica) -> None:
        name, load = f"replica {replica.replica_id}", len(replica.leases)
        _equal(f"{name}: leases of another", 0, sum(lease.replica is not replica for lease in replica.leases))
        _equal(f"{name}: calls above its capacity", 0, max(0, load - replica.capacity))
        _equal(f"{name}: calls while {replica.state}", 0, load if replica.state in WITHOUT_CALLS else 0)
        _equal(f"{name}: known version", replica.state in VERSIONED, replica.version is not None)
        _equal(f"{name}: uncommitted versions", 0, max(0, (replica.version or 0) - self._committed))

    async def _resume(self, replica: Replica, operation: str, version: int | None) -> bool:
        replica.resuming = True
        too_late = asyncio.get_running_loop().call_later(RESUME_S, self._stop_awaiting, replica)
        try:
            alive = await self._command(replica, replica.control.resume())
            return alive and await self._enter(replica, SERVING, operation, version)
        finally:
            too_late.cancel()
            self._stop_awaiting(replica)

    def _stop_awaiting(self, replica: Replica) -> None:
        """Calls that prefer it need not wait for it any longer."""
        replica.resuming = False
        self._grant_waiting()

    async def _enter(self, replica: Replica, state: ReplicaState, operation: str, version: int | None = None) -> bool:
        self._move(replica, state, operation, version)
        return True

    async def _cut(self, replica: Replica) -> bool:
        """Has its requests cut, whatever state it is in; whether it is alive."""
        if replica.state is SERVING:
            self._move(replica, PAUSED, "pause")
            return await self._command(replica, replica.control.pause(PauseMode.ABORT))
        if replica.state in (PAUSED, SYNCING):
            return await self._command(replica, replica.control.abort_all())
        return replica.state is not DEAD

    async def _command(self, replica: Replica, command: Coroutine[Any, Any, None]) -> bool:
        """Runs a control's command; whether the replica is alive after it. A death interrupts the command."""
        replica.command = asyncio.ensure_future(command)
        try:
            done, _ = await asyncio.wait({replica.command}, timeout=self._deadline_s)
            if not done:
                replica.timed_out = True
                reason = f"{replica.state}: its control has not answered for {self._deadline_s} s"
                self.lost(replica.replica_id, reason, engine=replica.engine)
                return False
            if not replica.command.cancelled() and isinstance(loss := replica.command.exception(), ReplicaLostError):
                self.lost(replica.replica_id, loss.reason, engine=replica.engine)
            if replica.state is not DEAD:
                replica.command.result()
        finally:
            replica.command.cancel()
            replica.command = None
        return replica.state is not DEAD

    async def _each(
        self,
        ids: Collection[str],
        goal: ReplicaState,
        operation: str,
        run: Callable[[Replica], Awaitable[bool]],
        *,
        pauses_first: bool = False,
    ) -> list[str]:
        def check(replica: Replica) -> None:
            state = PAUSED if pauses_first and replica.state is SERVING else replica.state
            check_transition(replica.replica_id, state, goal, operation)

        async def run_locked(replica: Replica) -> bool:
            async with replica.lock:
                if replica.state is DEAD:
                    return False
                check(replica)
                return await run(replica)

        replicas = [self._replica(replica_id) for replica_id in dict.fromkeys(ids)]
        for replica in replicas:
            if replica.state is DEAD or not replica.lock.locked():
                check(replica)
        outcomes = await asyncio.gather(*map(run_locked, replicas), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [replica.replica_id for replica, outcome in zip(replicas, outcomes, strict=True) if outcome]

    def _put(self, replica: Replica, why: str) -> None:
        name, capacity = replica.replica_id, replica.capacity
        if capacity < 1:
            raise ValueError(f"replica {name}: capacity={capacity}; give room for one call at least")
        if (known := self._replicas.get(name)) is not None and known.state is not DEAD:
            raise ValueError(f"replica {name} exists already, {known.state}; remove it or take another id")
        self._replicas[name] = replica
        self._changed(replica, why)

    def _replica(self, replica_id: str) -> Replica:
        if replica_id not in self._replicas:
            raise ValueError(f"replica={replica_id!r} is not in the fleet; there are {sorted(self._replicas)}")
        return self._replicas[replica_id]

    def _move(self, replica: Replica, state: ReplicaState, operation: str, version: int | None = None) -> None:
        self._dropped += replica.move(state, operation, version)
        self._changed(replica, operation)

    def _lose(self, replica: Replica, reason: str) -> None:
        self._dropped += replica.move(DEAD, "lost")
        if replica.command is not None:
            replica.command.cancel()
        replica.engine.close()
        self._changed(replica, reason)

    def _changed(self, replica: Replica, why: str) -> None:
        if self._on_change is not None:
            self._on_change(replica.view, why)
        self._grant_waiting()


def _equal(law: str, expected: int, found: int) -> None:
    if expected != found:
        raise IntegrityError(law, expected, found)
