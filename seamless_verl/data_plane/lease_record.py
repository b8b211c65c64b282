"""What a lease of a runner has beside its task: its session, and its events in the journal, which outlive a process.

The subject of an event is the lease's id, or the task's where there is no lease. Its kinds, and what each may follow:
*leased*, then *done*, then an end. The ends are *lost*, *given back*, *task refused* and *withdrawn*; a task without a
lease ends as *unclaimed* or *withdrawn*. *refused* is a request that was turned away: it ends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from seamless_verl.data_plane.lease_book import LeaseTerms
from seamless_verl.data_plane.sessions import Sessions
from seamless_verl.journal import BEGUN, LEASED, OutsideEvent
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.session import Closed

# Why a session is dropped.
NO_RUNNER = (Closed.RUNNER_LOST, DropReason.RUNNER_LOST, "no runner works on it any more")
UNWANTED = (Closed.ABANDONED, DropReason.SESSION, "its task is no longer wanted")


def event(kind: str, subject: str, detail: dict[str, Any]) -> OutsideEvent:
    """An event of now."""
    return OutsideEvent(kind, subject, detail, time.time())


@dataclass(frozen=True)
class LiveLease:
    """A lease without an end on record; `outcome` has the fields of a TaskCompletion, if its runner completed it."""

    lease_id: str
    task_id: str
    session_id: str
    runner: str
    attempt: int
    terms: LeaseTerms
    outcome: dict[str, Any] | None = None

    def events(self) -> list[OutsideEvent]:
        """What is recorded of it, so that `live_leases` finds it again."""
        detail = {
            "task": self.task_id,
            "session": self.session_id,
            "runner": self.runner,
            "attempt": self.attempt,
            "terms": asdict(self.terms),
        }
        begun = event(LEASED, self.lease_id, detail)
        return [begun] if self.outcome is None else [begun, done(self.lease_id, self.task_id, self.outcome)]


def done(lease_id: str, task_id: str, outcome: dict[str, Any]) -> OutsideEvent:
    """Its runner completed the lease."""
    return event("done", lease_id, {"task": task_id, "outcome": outcome})


def live_leases(events: Sequence[OutsideEvent]) -> list[LiveLease]:
    """The leases of this run that have no end, by its events in their order; a task has one at most, its last."""
    begun = max((number for number, found in enumerate(events) if found.kind == BEGUN), default=-1)
    live = dict[str, dict[str, Any]]()
    outcomes = dict[str, dict[str, Any]]()
    for found in events[begun + 1 :]:
        if found.kind == LEASED:
            live[found.subject] = found.detail
        elif found.kind == "done":
            outcomes[found.subject] = found.detail["outcome"]
        elif found.kind != "refused":
            live.pop(found.subject, None)
    newest = {detail["task"]: lease_id for lease_id, detail in live.items()}
    return [_live_lease(lease_id, live[lease_id], outcomes.get(lease_id)) for lease_id in newest.values()]


def _live_lease(lease_id: str, detail: dict[str, Any], outcome: dict[str, Any] | None) -> LiveLease:
    terms = LeaseTerms(**detail["terms"])
    return LiveLease(lease_id, detail["task"], detail["session"], detail["runner"], detail["attempt"], terms, outcome)


class LeaseSessions:
    """The session of each lease that is not over, also of one whose result waits, and its task.

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
