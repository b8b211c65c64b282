"""The fleet: the roster, and what is done to its replicas.

Invariants:
- Operations on one replica follow each other; its death interrupts the one that runs.
- What takes a replica's calls away first has the engine cut them, so that all they produced is on its way.
- A replica stops being routed to before it is stopped, and is routed to again after it was started.

A `keep` pause leaves calls attached: they go on at the resume, with new weights if there was a sync.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

from seamless_verl.errors import ReplicaLostError, ReplicaVersionError
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.replica import Replica
from seamless_verl.rollout.roster import Roster
from seamless_verl.rollout.states import DEAD, LENT, PAUSED, SERVING, STALE, SYNCING, ReplicaState, check_transition

STARTING_S = 1.0  # for a replica to go on, which takes milliseconds: calls wait for their home no longer than that


class Fleet(Roster):
    """The replicas and their operations. A control that takes more than `deadline_s` loses its replica.

    An operation takes ids, checks all of them before it touches one, and returns those for which it came true;
    one that dies on the way is DEAD and left out. It raises ReplicaStateError when a replica is in a state that
    does not allow it, and ValueError for an id that is not there. Another error of a control is raised after
    the operation has ended on all replicas; the replica it came from is then not routed to.
    """

    def __init__(self, *, deadline_s: float | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._deadline_s = deadline_s

    async def pause(self, ids: Collection[str], mode: PauseMode) -> list[str]:
        """SERVING to PAUSED."""

        async def stop(replica: Replica) -> bool:
            self._move(replica, PAUSED, "pause")
            return await self._command(replica, replica.control.pause(mode))

        return await self._each(ids, PAUSED, "pause", stop)

    async def resume(self, ids: Collection[str]) -> list[str]:
        """PAUSED to SERVING."""
        return await self._each(ids, SERVING, "resume", lambda replica: self._start(replica, "resume", None))

    async def lend(self, ids: Collection[str]) -> list[str]:
        """SERVING, PAUSED or STALE to LENT: its calls are cut, then its device may go."""

        async def part(replica: Replica) -> bool:
            return await self._cut(replica) and await self._enter(replica, LENT, "lend")

        return await self._each(ids, LENT, "lend", part, pauses_first=True)

    async def reclaimed(self, ids: Collection[str]) -> list[str]:
        """LENT to STALE: its device is back, it must be refitted."""
        return await self._each(ids, STALE, "reclaimed", lambda replica: self._enter(replica, STALE, "reclaimed"))

    async def begin_sync(self, ids: Collection[str]) -> list[str]:
        """PAUSED or STALE to SYNCING; requests frozen by a `keep` pause stay in the engine."""
        return await self._each(ids, SYNCING, "begin_sync", lambda replica: self._enter(replica, SYNCING, "begin_sync"))

    async def refit(self, ids: Collection[str], version: int, weights: Any) -> list[str]:
        """SERVING, PAUSED or STALE to SERVING with the committed weights: one command stops, loads and starts it.

        Raises:
            ReplicaVersionError: they are not the committed ones; nothing changed.
            WeightsNotLoadedError: of a replica that could not load them, which is SYNCING still.
        """
        self.check_committed(ids, version)

        async def refitted(replica: Replica) -> bool:
            if replica.state is SERVING:
                self._move(replica, PAUSED, "pause")
            self._move(replica, SYNCING, "begin_sync")
            alive = await self._command(replica, replica.control.refit(version, weights))
            return alive and await self._enter(replica, SERVING, "synced", version)

        return await self._each(ids, SYNCING, "begin_sync", refitted, pauses_first=True)

    async def synced(self, ids: Collection[str], version: int) -> list[str]:
        """SYNCING to SERVING: it has these weights now.

        Raises:
            ReplicaVersionError: they are not the committed ones; the replicas are SYNCING still.
        """
        self.check_committed(ids, version)
        return await self._each(ids, SERVING, "synced", lambda replica: self._start(replica, "synced", version))

    async def sync_failed(self, ids: Collection[str]) -> list[str]:
        """SYNCING to STALE: its weights may be of two versions, so that what was frozen is cut."""

        async def spoil(replica: Replica) -> bool:
            alive = await self._command(replica, replica.control.abort_all())
            return alive and await self._enter(replica, STALE, "sync_failed")

        return await self._each(ids, STALE, "sync_failed", spoil)

    async def remove(self, replica_id: str) -> None:
        """Takes a replica out and closes its engine; its calls go on elsewhere."""
        replica = self._of(replica_id)
        async with replica.lock:
            if replica.state is not DEAD and await self._cut(replica):
                self._lose(replica, "removed")
        if self._replicas.get(replica_id) is replica:
            del self._replicas[replica_id]

    def check_committed(self, ids: Collection[str], version: int) -> None:
        """Raises ReplicaVersionError."""
        for replica_id in ids if version != self.committed else ():
            raise ReplicaVersionError(replica_id, version, self.committed)

    def given_up(self, replica_id: str) -> bool:
        """Whether it is dead because its control did not answer in time."""
        return self._of(replica_id).given_up

    async def _start(self, replica: Replica, by: str, version: int | None) -> bool:
        replica.resuming = True
        too_late = asyncio.get_running_loop().call_later(STARTING_S, self._await_no_more, replica)
        try:
            alive = await self._command(replica, replica.control.resume())
            return alive and await self._enter(replica, SERVING, by, version)
        finally:
            too_late.cancel()
            self._await_no_more(replica)

    def _await_no_more(self, replica: Replica) -> None:
        """Who waits for it, because their home is there, need not."""
        replica.resuming = False
        self._serve()

    async def _enter(self, replica: Replica, state: ReplicaState, by: str, version: int | None = None) -> bool:
        self._move(replica, state, by, version)
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
                replica.given_up = True
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
        by: str,
        operation: Callable[[Replica], Awaitable[bool]],
        *,
        pauses_first: bool = False,
    ) -> list[str]:
        def check(replica: Replica) -> None:
            state = PAUSED if pauses_first and replica.state is SERVING else replica.state
            check_transition(replica.replica_id, state, goal, by)

        async def alone(replica: Replica) -> bool:
            async with replica.lock:
                if replica.state is DEAD:
                    return False
                check(replica)
                return await operation(replica)

        replicas = [self._of(replica_id) for replica_id in dict.fromkeys(ids)]
        for replica in replicas:
            if replica.state is DEAD or not replica.lock.locked():
                check(replica)
        done = await asyncio.gather(*map(alone, replicas), return_exceptions=True)
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
        return [replica.replica_id for replica, outcome in zip(replicas, done, strict=True) if outcome]
