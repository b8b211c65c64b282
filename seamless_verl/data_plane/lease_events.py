"""What the journal knows of the leases of runners: their events, and the leases that are live after them.

The subject of an event is the lease's id, or the task's where there is no lease. Its kinds, and what each may follow:
*leased*, then *done*, then an end. The ends are *lost*, *given back*, *task refused* and *withdrawn*; a task without a
lease ends as *unclaimed* or *withdrawn*. *refused* is a request that was turned away: it ends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from seamless_verl.data_plane.lease_book import LeasedTask, LeaseTerms
from seamless_verl.journal import BEGUN, LEASED, OutsideEvent


@dataclass(frozen=True)
class LiveLease:
    """A lease without an end on record; `outcome` has the fields of a TaskCompletion, if its runner completed it."""

    lease_id: str
    task_id: str
    session_id: str
    runner: str
    attempt: int
    terms: LeaseTerms
    outcome: dict[str, Any] | None


def event(kind: str, subject: str, detail: dict[str, Any]) -> OutsideEvent:
    """An event of now."""
    return OutsideEvent(kind, subject, detail, time.time())


def leased(lease_id: str, task: LeasedTask, session_id: str) -> OutsideEvent:
    """The task was leased, with what `live_leases` needs to make the lease again."""
    detail = {
        "task": task.task_id,
        "session": session_id,
        "runner": task.runner,
        "attempt": task.attempts,
        "terms": asdict(task.terms),
    }
    return event(LEASED, lease_id, detail)


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


def again(restored: Sequence[LiveLease]) -> list[OutsideEvent]:
    """The events of leases that a later start of the run goes on with, for the record that it begins."""
    events = []
    for live in restored:
        detail = {
            "task": live.task_id,
            "session": live.session_id,
            "runner": live.runner,
            "attempt": live.attempt,
            "terms": asdict(live.terms),
        }
        events.append(event(LEASED, live.lease_id, detail))
        if live.outcome is not None:
            events.append(event("done", live.lease_id, {"task": live.task_id, "outcome": live.outcome}))
    return events
