"""A node over its limit is named once, recovered at most once, and left if that did not help."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.ledger import Clock

from seamless_verl.runtime.stuck import ENDED, LEFT, NAMED, TRIED, StuckNodes
from seamless_verl.runtime.waits import Blocked, Wait, WaitKind

LIMITS = {WaitKind.REPLICA: 40.0, WaitKind.GROUP: 10.0}


def over(name: str, kind: WaitKind = WaitKind.REPLICA) -> Blocked:
    return Blocked((Wait(kind, name, 50.0),), LIMITS)


def names(found: list[Blocked]) -> list[str]:
    return [one.over.name for one in found]


def test_a_node_is_named_once_until_it_was_within_its_limit() -> None:
    nodes = StuckNodes(Clock())
    assert names(nodes.look([over("a"), over("b")])) == ["a", "b"]
    assert names(nodes.look([over("a")])) == []
    assert (nodes.stage("a"), nodes.stage("b")) == (NAMED, ENDED)
    assert names(nodes.look([over("b")])) == ["b"]
    assert nodes.metrics() == {"watchdog/over_limit": 1, "watchdog/named/replica": 3}


def test_a_recovery_may_take_as_long_as_the_limit_and_is_tried_once() -> None:
    nodes = StuckNodes(clock := Clock())
    nodes.look([over("a")])
    nodes.tried("a")
    clock.now = 40
    nodes.look([over("a")])
    assert nodes.stage("a") is TRIED
    clock.now = 40.1
    nodes.look([over("a")])
    assert nodes.stage("a") is LEFT and nodes.metrics()["watchdog/recovery/replica"] == 1
    nodes.look([])
    assert nodes.stage("a") is ENDED and nodes.metrics()["watchdog/over_limit"] == 0


def test_what_was_recovered_may_be_recovered_again() -> None:
    nodes = StuckNodes(Clock())
    for _ in range(2):
        nodes.look([over("a")])
        nodes.tried("a")
        nodes.look([])
    assert nodes.metrics()["watchdog/recovery/replica"] == 2


@given(st.lists(st.tuples(st.sets(st.sampled_from("abc")), st.floats(0, 100)), max_size=20))
def test_no_node_has_two_recoveries_in_a_row(looks: list[tuple[set[str], float]]) -> None:
    nodes, tried = StuckNodes(clock := Clock()), set[str]()
    for found, seconds in looks:
        clock.now += seconds
        nodes.look([over(name) for name in sorted(found)])
        tried &= found
        for name in found:
            if nodes.stage(name) is NAMED:
                assert name not in tried
                nodes.tried(name)
                tried.add(name)
        nodes.check_integrity()
