"""What holds a run up is found in its graph of waits, and named with its chain."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.runtime.waits import TRAINER, Blocked, Wait, WaitKind, find_blocked, follow, is_over, merge

LIMITS = {WaitKind.REPLICA: 40.0, WaitKind.CALL: 40.0, WaitKind.GROUP: 100.0, WaitKind.QUEUE: 60.0}
KINDS = (WaitKind.GROUP, WaitKind.SESSION, WaitKind.CALL, WaitKind.REPLICA, WaitKind.QUEUE)


def trainer(*on: str, stage: str = "waiting for groups, step 12") -> Wait:
    return Wait(WaitKind.TRAINER, TRAINER, 50.0, on, stage)


def group(name: str, *on: str, s: float = 50.0) -> Wait:
    return Wait(WaitKind.GROUP, f"group {name}", s, on, "has 1 sessions that run without a call")


def session(name: str, *on: str, s: float = 45.0) -> Wait:
    return Wait(WaitKind.SESSION, f"session {name}", s, on, "has had no call of its agent")


def call(name: str, *on: str, s: float = 44.0) -> Wait:
    return Wait(WaitKind.CALL, f"call {name}", s, on, "has got no token")


def replica(number: int, *on: str, s: float = 43.0) -> Wait:
    return Wait(WaitKind.REPLICA, f"replica-{number}", s, on, "has given none of its calls a token")


def lines(*waits: Wait) -> list[str]:
    return [str(blocked) for blocked in find_blocked(waits, LIMITS)]


def test_a_stuck_replica_is_named_with_the_chain_from_the_trainer() -> None:
    waits = [
        trainer("group 7"),
        group("7", "session s3"),
        session("s3", "call c9"),
        call("c9", "replica-1"),
        replica(1),
    ]
    assert lines(*waits) == [
        "the trainer (waiting for groups, step 12) waits for group 7 -> session s3 -> call c9 -> replica-1, which has "
        "given none of its calls a token for 43 s"
    ]
    (blocked,) = find_blocked(waits, LIMITS)
    assert blocked.culprit == blocked.over == waits[-1]


def test_nothing_is_named_within_the_limits() -> None:
    assert lines(trainer("group 7"), group("7", "call c9"), call("c9", "replica-1", s=39), replica(1, s=40)) == []


def test_a_group_over_its_limit_whose_agent_does_not_end_is_what_is_over() -> None:
    busy = [session("s1", "call c1", s=3), call("c1", "replica-0", s=3), replica(0, s=0.1)]
    waits = [group("7", "session s1", "session s2", s=120), *busy, session("s2", s=90)]
    (blocked,) = find_blocked(waits, LIMITS)
    assert str(blocked) == "group 7 waits for session s2, which has had no call of its agent for 90 s"
    assert (blocked.over.name, blocked.culprit.name) == ("group 7", "session s2")


def test_each_stuck_node_has_a_line_and_many_calls_of_one_replica_have_one() -> None:
    calls = [call(f"c{i}", "replica-1", s=60 + i) for i in range(5)]
    waits = [*calls, replica(1), call("c9", "replica-2", s=70), replica(2, s=1), replica(3, s=1)]
    assert [one.over.name for one in find_blocked(waits, LIMITS)] == ["call c9", "replica-1"]


def test_a_node_over_its_limit_is_blamed_before_one_that_waits_for_longer() -> None:
    waits = [group("7", "session s1", "call c1", s=120), session("s1", s=110), call("c1", "replica-0"), replica(0)]
    assert [one.culprit.name for one in find_blocked(waits, LIMITS)] == ["replica-0"]


def test_nodes_that_wait_for_each_other_are_named() -> None:
    waits = [trainer("group 7"), group("7", "call c1", s=120), call("c1", "replica-0", s=1), replica(0, TRAINER, s=30)]
    (blocked,) = find_blocked(waits, LIMITS)
    assert str(blocked) == (
        "group 7 waits for call c1 -> replica-0 -> the trainer (waiting for groups, step 12) -> group 7: they wait for "
        "each other, for 50 s"
    )


def test_a_cycle_is_not_blamed_where_something_else_is_over_its_limit() -> None:
    cycle = [call("c1", "replica-0", s=1), replica(0, "group 7", s=30)]
    waits = [group("7", "call c1", "TransferQueue", s=120), *cycle, Wait(WaitKind.QUEUE, "TransferQueue", 61.0)]
    assert [one.culprit.name for one in find_blocked(waits, LIMITS)] == ["TransferQueue"]


def test_a_node_that_waits_for_itself_or_for_what_is_not_known_is_named() -> None:
    assert lines(replica(1, "replica-1")) == ["replica-1 -> replica-1: they wait for each other, for 43 s"]
    assert lines(replica(1, "a node of another run")) == ["replica-1 has given none of its calls a token for 43 s"]


def test_what_the_trainer_waits_for_is_known_within_the_limits_too() -> None:
    waits = {wait.name: wait for wait in (trainer("group 7"), group("7", "session s2", s=3), session("s2", s=2))}
    line = str(follow(waits, waits[TRAINER], {}))
    assert line == (
        "the trainer (waiting for groups, step 12) waits for group 7 -> session s2, which has had no call of its agent "
        "for 2 s"
    )
    alone = trainer(stage="computing, step 3")
    assert str(follow({TRAINER: alone}, alone, {})) == "the trainer (computing, step 3) has been at this stage for 50 s"


@pytest.mark.parametrize(("kind", "counts"), [(WaitKind.REPLICA, 2.0), (WaitKind.GROUP, 50.0)])
def test_what_several_processes_say_of_a_node_is_one_node(kind: WaitKind, counts: float) -> None:
    first, second = Wait(kind, "it", 50.0, ("a", "b"), "one"), Wait(kind, "it", 2.0, ("b", "c"), "two")
    (merged,) = merge([first, second])
    assert (merged.waited_s, merged.on) == (counts, ("a", "b", "c"))


@st.composite
def graphs(draw: st.DrawFn) -> list[Wait]:
    names = [f"n{i}" for i in range(draw(st.integers(1, 9)))]
    on = st.lists(st.sampled_from([*names, "unknown"]), max_size=3).map(tuple)
    seconds = st.floats(0, 200, allow_nan=False)
    waits = [Wait(draw(st.sampled_from(KINDS)), name, draw(seconds), draw(on)) for name in names]
    return [*waits, trainer(*draw(on))] if draw(st.booleans()) else waits


def known(wait: Wait, nodes: dict[str, Wait]) -> set[str]:
    return {name for name in wait.on if name in nodes}


def reachable(start: Wait, nodes: dict[str, Wait]) -> set[str]:
    found, coming = {start.name}, [start.name]
    while coming:
        new = known(nodes[coming.pop()], nodes) - found
        found |= new
        coming += new
    return found


def check_chain(blocked: Blocked, nodes: dict[str, Wait]) -> None:
    chain = blocked.chain
    assert len({wait.name for wait in chain}) == len(chain)
    assert all(after.name in known(before, nodes) for before, after in pairwise(chain))
    if blocked.returns_to is None:
        assert not known(blocked.culprit, nodes), "it waits for something itself"
    else:
        assert blocked.returns_to in known(blocked.culprit, nodes) & {wait.name for wait in chain}


@given(graphs())
def test_for_each_node_over_its_limit_there_is_a_culprit_that_it_waits_for(waits: list[Wait]) -> None:
    nodes = {wait.name: wait for wait in waits}
    found = find_blocked(waits, LIMITS)
    over = [wait for wait in waits if is_over(wait, LIMITS)]
    assert bool(found) == bool(over)
    for blocked in found:
        check_chain(blocked, nodes)
        assert is_over(blocked.over, LIMITS)
    for start in over:
        blocked = follow(nodes, start, LIMITS)
        check_chain(blocked, nodes)
        ends = [nodes[name] for name in reachable(start, nodes) if not known(nodes[name], nodes)]
        assert blocked.chain[0] is start
        assert is_over(blocked.culprit, LIMITS) or not any(is_over(end, LIMITS) for end in ends)
        assert blocked.over.name in {one.over.name for one in found}
        if blocked.returns_to is None and ends:
            assert blocked.culprit.waited_s >= max(
                end.waited_s for end in ends if is_over(end, LIMITS) == is_over(blocked.culprit, LIMITS)
            )
