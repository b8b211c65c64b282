"""Which leases are live, by the events in the journal."""

from __future__ import annotations

import pytest

from seamless_verl.data_plane.lease_book import LeaseTerms
from seamless_verl.data_plane.lease_record import LiveLease, event, live_leases
from seamless_verl.journal import BEGUN, OutsideEvent

TERMS = LeaseTerms("solver", 10.0, None, 3)


def lease(name: str, task_id: str, attempt: int = 1) -> OutsideEvent:
    return LiveLease(name, task_id, f"session of {name}", "r1", attempt, TERMS).events()[0]


def end(kind: str, subject: str) -> OutsideEvent:
    return event(kind, subject, {"task": "t", "runner": "r1"})


def test_a_lease_without_an_end_is_live_with_what_it_began_with() -> None:
    (live,) = live_leases([lease("a", "t", attempt=2), end("refused", "a")])
    assert live == LiveLease("a", "t", "session of a", "r1", 2, TERMS), "a refused request ends no lease"


@pytest.mark.parametrize("kind", ["lost", "given back", "task refused", "withdrawn"])
def test_an_ended_lease_is_not(kind: str) -> None:
    assert live_leases([lease("a", "t"), end(kind, "a")]) == []


def test_a_completed_lease_has_its_outcome() -> None:
    outcome = {"reward": 1.0}
    (live,) = live_leases([lease("a", "t"), event("done", "a", {"task": "t", "outcome": outcome})])
    assert live.outcome == outcome
    assert live_leases(live.events()) == [live], "a later start records it again"


def test_a_task_has_its_last_lease_of_this_run_alone() -> None:
    assert [live.lease_id for live in live_leases([lease("a", "t"), lease("b", "t"), lease("c", "u")])] == ["b", "c"]
    assert live_leases([event(BEGUN, "", {}), lease("a", "t"), event(BEGUN, "", {})]) == []
