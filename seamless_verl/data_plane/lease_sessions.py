"""The session of each lease: opened when a task is leased, and over with its lease."""

from __future__ import annotations

from seamless_verl.data_plane.sessions import Sessions
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.session import Closed

# Why a session is dropped.
NO_RUNNER = (Closed.RUNNER_LOST, DropReason.RUNNER_LOST, "no runner works on it any more")
UNWANTED = (Closed.ABANDONED, DropReason.SESSION, "its task is no longer wanted")


class LeaseSessions:
    """Owned state: the session of each lease that is not over, also of one whose result waits, and its task.

    A session is taken out before it is dropped, so that it is dropped once. Until it is, it is still of a lease: others
    that clear up leave it.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._by_lease: dict[str, str] = {}
        self._task_of: dict[str, str] = {}
        self._dropping: set[str] = set()

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._task_of or session_id in self._dropping

    def of(self, lease_id: str) -> str:
        """The session of this lease; "" if it has none, or none any more."""
        return self._by_lease.get(lease_id, "")

    def task_of(self, session_id: str) -> str:
        """The task of this session; "" if it is of no lease."""
        return self._task_of.get(session_id, "")

    def add(self, lease_id: str, task_id: str, session_id: str) -> None:
        """The lease's agent runs on this session."""
        self._by_lease[lease_id], self._task_of[session_id] = session_id, task_id

    def take(self, lease_id: str) -> str | None:
        """Takes out the session of a lease that is over; None if it has none any more."""
        session_id = self._by_lease.pop(lease_id, None)
        self._task_of.pop(session_id or "", None)
        return session_id

    async def drop(self, lease_id: str, why: tuple[Closed, DropReason, str] = NO_RUNNER) -> None:
        """The lease is over without a result: nothing of its session is trained."""
        if (session_id := self.take(lease_id)) is None:
            return
        self._dropping.add(session_id)
        try:
            await self._sessions.drop(session_id, *why)
        finally:
            self._dropping.discard(session_id)

    def called(self, lease_id: str) -> bool:
        """Whether the lease's agent has made a call: a runner may give a task back for the replies."""
        session_id = self.of(lease_id)
        return session_id in self._sessions.closed and self._sessions.gateway.table.get(session_id).requests > 0

    def lose(self, lease_id: str, newest: int | None = None) -> None:
        """The next agent of the lease's task gets this one's replies, of weights up to `newest`."""
        if (session_id := self.of(lease_id)) in self._sessions.closed:
            self._sessions.lose(session_id, newest)
