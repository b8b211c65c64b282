"""Routing: calls of one key stay together, load stays even, and few keys move when replicas come and go."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.rollout import routing
from seamless_verl.rollout.replica import ReplicaState, ReplicaView
from seamless_verl.rollout.routing import PrefixAffinity

KEYS = [f"session {number}" for number in range(600)]


def view(*loads: int, capacity: int = 10, state: ReplicaState = ReplicaState.SERVING) -> list[ReplicaView]:
    return [ReplicaView(f"r{number}", state, 0, load, capacity) for number, load in enumerate(loads)]


def routed(replicas: list[ReplicaView]) -> dict[str, str | None]:
    return {key: PrefixAffinity().decide(replicas, key) for key in KEYS}


STARTS = (ReplicaState.PAUSED, ReplicaState.SYNCING)
REPLICA = st.builds(
    lambda state, load, capacity, comes: (
        state,
        min(load, capacity),
        capacity,
        comes == "starts" and state in STARTS,
        comes == "loads" and state in STARTS,
    ),
    st.sampled_from(ReplicaState),
    st.integers(0, 6),
    st.integers(1, 6),
    st.sampled_from(["starts", "loads", ""]),
)


@given(replicas=st.lists(REPLICA, max_size=6), key=st.text(max_size=5))
def test_a_replica_with_room_is_chosen_if_there_is_one_unless_the_preferred_is_awaited(
    replicas: list[tuple[ReplicaState, int, int, bool, bool]], key: str
) -> None:
    policy = PrefixAffinity()
    seen = [ReplicaView(f"r{n}", s, 0, load, size, *comes) for n, (s, load, size, *comes) in enumerate(replicas)]
    chosen, able = policy.decide(seen, key), {replica.replica_id for replica in seen if replica.has_slot}
    named = {replica.replica_id: replica for replica in seen}
    preferred = named.get(policy.preferred(seen)(key) or "")
    awaited = preferred is not None and preferred.coming and preferred.load < preferred.capacity
    if awaited and preferred is not None and preferred.expected:
        awaited = all(preferred.utilization < replica.utilization for replica in seen if replica.open)
    assert chosen in able if able and not awaited else chosen is None
    if preferred is not None and preferred.has_slot:  # only a less busy one is chosen instead
        assert chosen is not None and (named[chosen] is preferred or named[chosen].utilization < preferred.utilization)


def test_a_key_stays_and_keys_spread() -> None:
    first = routed(view(0, 0, 0, 0))
    assert first == routed(view(3, 3, 3, 3)) == routed(view(0, 1, 0, 1))
    assert all(100 < number < 200 for number in Counter(first.values()).values())


def test_a_replica_that_leaves_moves_only_its_own_keys_and_gets_them_back() -> None:
    before, after = routed(view(0, 0, 0, 0)), routed(view(0, 0, 0))
    moved = {key for key in KEYS if before[key] != after[key]}
    assert moved == {key for key in KEYS if before[key] == "r3"}
    spread = Counter(after[key] for key in moved)
    assert len(spread) == 3 and min(spread.values()) > len(moved) / 6


def test_a_larger_replica_holds_more_keys() -> None:
    small, large = ReplicaView("s", ReplicaState.SERVING, 0, 0, 10), ReplicaView("l", ReplicaState.SERVING, 0, 0, 30)
    assert 0.70 < Counter(routed([small, large]).values())["l"] / len(KEYS) < 0.80


def test_the_second_choice_then_the_least_loaded() -> None:
    policy, free = PrefixAffinity(), view(0, 0, 0)
    first = policy.decide(free, "k")
    second = policy.decide([replica for replica in free if replica.replica_id != first], "k")
    (third,) = {"r0", "r1", "r2"} - {first, second}

    def decide(**loads: int) -> str | None:
        return policy.decide(
            [ReplicaView(name, ReplicaState.SERVING, 0, load, 10) for name, load in loads.items()], "k"
        )

    assert decide(**{str(first): 2, str(second): 0, third: 0}) == first
    assert decide(**{str(first): 3, str(second): 0, third: 0}) == second
    assert decide(**{str(first): 10, str(second): 9, third: 0}) == second
    assert decide(**{str(first): 10, str(second): 10, third: 9}) == third
    assert decide(**{str(first): 10, str(second): 10, third: 10}) is None
    assert policy.metrics() == {"routing/preferred": 3.0, "routing/second": 2.0, "routing/spilled": 1.0}


def test_a_key_is_at_its_preferred_replica_or_counts_as_moved() -> None:
    """Where that loads weights, and is as busy as the least busy one that serves."""
    policy, free = PrefixAffinity(), view(2, 2)
    first = policy.decide(free, "k")
    loading = [replace(one, expected=one.replica_id == first, outdated=one.replica_id == first) for one in free]
    assert policy.decide(loading, "k") not in (first, None)
    assert policy.metrics() == {"routing/preferred": 1.0, "routing/second": 1.0, "routing/spilled": 0.0}
    assert policy.decide([replace(one, load=one.load + (not one.expected)) for one in loading], "k") is None


def test_rankings_take_bounded_memory_and_are_those_of_the_replicas_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "RANKINGS", 100)
    policy = PrefixAffinity()
    for replicas in (view(0, 0, 0), view(0, 0), view(0, 0, 0)):
        assert {key: policy.decide(replicas, key) for key in KEYS} == routed(replicas)
    assert policy._ranking.cache_info().currsize == 100
