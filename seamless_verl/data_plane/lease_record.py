"""What outlives a process of the leases of runners: their events in the journal, and the sessions that stay open.

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
from seamless_verl.journal import BEGUN, LEASED, OutsideEvent


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
