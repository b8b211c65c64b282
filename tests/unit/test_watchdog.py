"""What is stuck and who is to blame."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import Clock

from seamless_verl.resources.watchdog import Finding, Verdict, Watchdog, report

LIMITS = {"call": 60.0, "group": 100.0, "replica": 60.0}


def dog(clock: Clock) -> Watchdog:
    return Watchdog(LIMITS, clock=clock)


def names(findings: list[Finding]) -> list[tuple[str, Verdict]]:
    return [(f"{finding.kind} {finding.id}", finding.verdict) for finding in findings]


def test_what_makes_progress_is_not_stuck() -> None:
    clock = Clock()
    watched = dog(clock)
    watched.began("call", "c")
    for clock.now in range(50, 500, 50):
        assert watched.check() == []
        watched.progress("call", "c")
    clock.now = 509
    assert watched.check() == []
    assert names(watched.check(510)) == [("call c", Verdict.STUCK)]
    watched.ended("call", "c")
    assert watched.check(10_000) == [] and len(watched) == 0


def test_a_deadline_holds_whatever_the_progress() -> None:
    clock = Clock()
    watched = dog(clock)
    watched.began("transition", "t", deadline=30)
    clock.now = 29
    watched.progress("transition", "t")
    assert watched.check(29.9) == []
    (finding,) = watched.check(40)
    assert (finding.kind, finding.id, finding.began, finding.since, finding.overdue) == ("transition", "t", 0, 29, 10)
    assert report([finding]) == ("transition 't': stuck for 11.0 s, overdue by 10.0 s; waits for nothing that is known")


def test_a_transition_past_its_deadline_explains_calls_and_their_group() -> None:
    clock = Clock()
    watched = dog(clock)
    calls = [("call", f"c{n}") for n in range(5)]
    watched.began("group", "g", waits_on=calls)
    for call in calls:
        watched.began(*call, waits_on=[("replica", "r0")])
    watched.began("call", "elsewhere", waits_on=[("replica", "r1")])
    watched.began("transition", "pause", deadline=30, holds=[("replica", "r0")])
    clock.now = 90
    watched.progress("call", "elsewhere")
    findings = watched.check(105)
    assert names(findings[:1]) == [("transition pause", Verdict.STUCK)]
    assert names(findings[1:]) == [*((f"call c{n}", Verdict.HELD_UP) for n in range(5)), ("group g", Verdict.HELD_UP)]
    assert {finding.culprit for finding in findings} == {("transition", "pause")}
    assert report(findings).splitlines() == [
        "transition 'pause': stuck for 105.0 s, overdue by 75.0 s; waits for nothing that is known",
        "  holds up 5 of kind call, one for 105.0 s: call 'c0', call 'c1', call 'c2' and 2 more",
        "  holds up 1 of kind group, one for 105.0 s: group 'g'",
    ]


def test_a_deadlock_is_named_as_a_ring() -> None:
    """The hand-over waits for a call to drain, the call for its replica, which the hand-over has stopped."""
    clock = Clock()
    watched = dog(clock)
    watched.began("transition", "lend", deadline=30, waits_on=[("call", "c")], holds=[("replica", "r0")])
    watched.began("call", "c", waits_on=[("replica", "r0")])
    watched.began("group", "g", waits_on=[("call", "c")])
    findings = watched.check(31)
    assert names(findings) == [("transition lend", Verdict.DEADLOCK), ("call c", Verdict.DEADLOCK)]
    assert report(findings) == (
        "transition 'lend': deadlock for 31.0 s, overdue by 1.0 s; "
        "transition 'lend' waits for call 'c' waits for transition 'lend'"
    )
    late = watched.check(101)
    assert names(late)[2:] == [("group g", Verdict.HELD_UP)]
    assert report(late).splitlines()[1:] == ["  holds up 1 of kind group, one for 101.0 s: group 'g'"]


def test_a_call_that_generates_is_in_no_deadlock_with_who_drains_it() -> None:
    clock = Clock()
    watched = dog(clock)
    watched.began("transition", "lend", deadline=30, waits_on=[("call", "c")], holds=[("replica", "r0")])
    watched.began("call", "c", waits_on=[("replica", "r0")])
    clock.now = 29
    watched.progress("call", "c")
    findings = watched.check(31)
    assert names(findings) == [("transition lend", Verdict.SLOW)]
    assert report(findings).endswith("overdue by 1.0 s; waits for call 'c'")


@pytest.mark.parametrize("size", [2, 3, 7])
def test_everybody_waits_and_nobody_moves(size: int) -> None:
    clock = Clock()
    watched = dog(clock)
    for n in range(size):
        watched.began("call", f"c{n}")
    clock.now = 5
    for n in range(size):
        watched.waits("call", f"c{n}", on=[("call", f"c{(n + 1) % size}")])
    findings = watched.check(60)
    assert {finding.verdict for finding in findings} == {Verdict.DEADLOCK} and len(findings) == size
    for finding in findings:
        assert len(finding.cycle) == size and finding.cycle[0] == (finding.kind, finding.id)
    assert len(report(findings).splitlines()) == 1


def test_who_waits_for_what_has_ended_was_not_woken() -> None:
    clock = Clock()
    watched = dog(clock)
    watched.began("call", "c")
    watched.began("group", "g", waits_on=[("call", "c")])
    watched.ended("call", "c")
    findings = watched.check(100)
    assert names(findings) == [("group g", Verdict.NOT_WOKEN)]
    assert "not woken for 100.0 s" in report(findings) and "call 'c', ended or never begun" in report(findings)


def test_a_group_whose_last_call_ended_without_its_notice_was_not_woken() -> None:
    clock = Clock()
    watched = dog(clock)
    calls = [("call", "a"), ("call", "b")]
    for call in calls:
        watched.began(*call)
    watched.began("group", "g", waits_on=calls)
    clock.now = 10
    watched.ended("call", "a")
    watched.progress("group", "g")
    watched.ended("call", "b")
    assert names(watched.check(110)) == [("group g", Verdict.NOT_WOKEN)]


def test_who_moved_since_it_said_it_waits_is_stuck_by_itself() -> None:
    clock = Clock()
    watched = dog(clock)
    watched.began("replica", "r")
    watched.began("call", "c", waits_on=[("replica", "r")])
    clock.now = 10
    watched.progress("call", "c")
    clock.now = 60
    watched.progress("replica", "r")
    assert names(watched.check(70)) == [("call c", Verdict.STUCK)]


def test_who_waits_on_one_that_is_not_overdue_itself_shows_the_way_to_the_culprit() -> None:
    clock = Clock()
    watched = dog(clock)
    watched.began("call", "c", waits_on=[("engine", "e")])
    watched.began("engine", "e", waits_on=[("lock", "l")])
    watched.began("lock", "l", deadline=20)
    findings = watched.check(70)
    assert names(findings) == [
        ("lock l", Verdict.STUCK),
        ("engine e", Verdict.HELD_UP),
        ("call c", Verdict.HELD_UP),
    ]
    assert findings[1].overdue < 0 and "overdue" not in str(findings[1])


def test_the_culprit_of_most_comes_first() -> None:
    clock = Clock()
    watched = dog(clock)
    watched.began("replica", "old")
    clock.now = 1
    watched.began("replica", "r")
    watched.began("call", "a", waits_on=[("replica", "r")])
    watched.began("call", "b", waits_on=[("replica", "r")])
    clock.now = 0
    assert [f.id for f in watched.check(100)] == ["r", "a", "b", "old"]


def test_what_is_held_waits_for_its_holder_and_the_holder_not_for_itself() -> None:
    clock = Clock()
    watched = dog(clock)
    watched.began("replica", "r")
    watched.began("transition", "t", deadline=30, holds=[("replica", "r")], waits_on=[("replica", "r")])
    watched.ended("replica", "r")
    assert names(watched.check(61)) == [("transition t", Verdict.NOT_WOKEN)]
    watched.ended("transition", "t")
    watched.began("replica", "r")
    watched.began("transition", "t", deadline=30, holds=[("replica", "r")])
    assert names(watched.check(61)) == [("transition t", Verdict.STUCK), ("replica r", Verdict.HELD_UP)]


def test_waiting_for_nothing_any_more_is_said_too() -> None:
    clock = Clock()
    watched = dog(clock)
    watched.began("replica", "r")
    watched.began("call", "c", waits_on=[("replica", "r")])
    clock.now = 50
    watched.waits("call", "c", on=[])
    findings = watched.check(60)
    assert {f.id: f.verdict for f in findings} == {"r": Verdict.STUCK, "c": Verdict.STUCK}


def test_marks_of_what_has_ended_are_left_alone() -> None:
    watched = dog(Clock())
    watched.progress("call", "late")
    watched.waits("call", "late", on=[("replica", "r")])
    watched.ended("call", "late")
    assert watched.check(1e9) == []


def test_mistakes_are_named() -> None:
    watched = dog(Clock())
    watched.began("call", "c")
    with pytest.raises(ValueError, match="call 'c' has begun and not ended"):
        watched.began("call", "c")
    with pytest.raises(ValueError, match=r"limits\['call'\]=0"):
        Watchdog({"call": 0})


edges = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20)


@settings(max_examples=200, deadline=None)
@given(edges=edges, alive=st.sets(st.integers(0, 7)), data=st.data())
def test_the_blame_is_well_founded(edges: list[tuple[int, int]], alive: set[int], data: st.DataObject) -> None:
    """Any graph of waits: all overdue items are explained, by what they can reach, and rings are rings."""
    clock = Clock()
    watched = dog(clock)
    waits = {n: [("call", str(b)) for a, b in edges if a == n] for n in range(8)}
    for n in data.draw(st.permutations(range(8))):
        watched.began("call", str(n), waits_on=waits[n])
    clock.now = 30
    for n in alive:
        watched.progress("call", str(n))
    findings = {f.id: f for f in watched.check(70)}
    assert set(findings) == {str(n) for n in range(8) if n not in alive}
    order = list(findings)
    for name, finding in findings.items():
        assert finding.overdue >= 0
        assert order.index(finding.culprit.id) <= order.index(name)
        on = {key.id for key in finding.waits_on} & set(findings)
        if finding.verdict is Verdict.DEADLOCK:
            ring = [*finding.cycle, finding.cycle[0]]
            assert all(b in findings[a.id].waits_on for a, b in pairwise(ring))
        elif finding.verdict is Verdict.HELD_UP:
            assert finding.culprit.id in reachable(int(name), edges) and on
        else:
            assert not on and finding.culprit.id == name
    for name in findings:
        if name in reachable(int(name), [(a, b) for a, b in edges if {a, b}.isdisjoint(alive)]):
            reached = {findings[other].verdict for other in reachable(int(name), edges) if other in findings}
            assert Verdict.DEADLOCK in reached


def reachable(start: int, edges: list[tuple[int, int]]) -> set[str]:
    found: set[int] = set()
    todo = [start]
    while todo:
        at = todo.pop()
        new = {b for a, b in edges if a == at} - found
        found |= new
        todo += new
    return {str(n) for n in found}


def test_ten_thousand_calls_are_checked_quickly() -> None:
    clock = Clock()
    watched = dog(clock)
    watched.began("transition", "t", deadline=10, holds=[("replica", "r")])
    for n in range(10_000):
        watched.began("call", str(n), waits_on=[("replica", "r")])
        watched.began("group", str(n), waits_on=[("call", str(n))])
    begun = time.process_time()
    assert watched.check(5) == []
    findings = watched.check(200)
    assert len(findings) == 20_001 and len(report(findings).splitlines()) == 3
    assert time.process_time() - begun < 10
