"""Routing: which serving replica runs a call. The policy reads a frozen view, and keeps counts of its decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import TypeAlias

from seamless_verl.rollout.replica import ReplicaView

MARGIN = 0.2  # of a replica's capacity: so much busier may a key's first candidate be than its second
# Rankings that are kept: a conversation asks at every turn, and while it waits. It is one for each of 8,192 open calls;
# one that was dropped is computed again in about a microsecond a replica.
RANKINGS = 8_192
Sizes: TypeAlias = tuple[tuple[str, int], ...]  # ids and capacities of all replicas
FleetView: TypeAlias = Sequence[ReplicaView]


class PrefixAffinity:
    """Keeps calls of one key on one replica, whose cache has their prefix, as long as loads stay near each other.

    A key has two candidates by weighted rendezvous hashing (Thaler and Ravishankar 1998; weights by Schindelhauer and
    Schomaker 2005), so that a replica that joins or leaves moves only the keys it wins or held. The first one is taken
    unless it is full, or busier than the second by more than `MARGIN`; then the second, and if both are full, the least
    loaded.

    A first candidate that does not serve yet and has room is awaited: else the first of several replicas that start
    would get all waiting calls. One that is starting serves in milliseconds. One that loads weights may take seconds,
    and is awaited only if it is less busy than all that serve.
    """

    OUTCOMES = ("preferred", "second", "spilled")

    def __init__(self) -> None:
        self._counts = dict.fromkeys(self.OUTCOMES, 0)
        self._ranking = lru_cache(RANKINGS)(_ranking)

    def decide(self, view: FleetView, key: str) -> str | None:
        """The id of the replica for a call of this key, or None if no serving replica has room."""
        available = {replica.replica_id: replica for replica in view if replica.available}
        ranked = [available[name] for name in self._ranking(_sizes(view), key) if name in available]
        outcome, chosen = _choose([replica for replica in ranked if not replica.coming])
        if chosen is None or (ranked[0].coming and ranked[0].replica_id in self.awaited(ranked)):
            return None
        self._counts[outcome if outcome != "preferred" or chosen is ranked[0] else "second"] += 1
        return chosen.replica_id

    def preferred(self, view: FleetView) -> Callable[[str], str | None]:
        """A function from a key to its preferred replica among the available ones, None without a preference."""
        available, sizes = {replica.replica_id for replica in view if replica.available}, _sizes(view)
        return lambda key: next((name for name in self._ranking(sizes, key) if name in available), None)

    def awaited(self, view: FleetView) -> frozenset[str]:
        """The replicas that do not serve yet, and that calls which prefer them wait for, although others have room."""
        least = min((replica.utilization for replica in view if replica.open), default=math.inf)
        free = (replica for replica in view if replica.coming and replica.load < replica.capacity)
        return frozenset(one.replica_id for one in free if one.starting or one.utilization < least)

    def metrics(self) -> dict[str, float]:
        return {f"routing/{outcome}": float(count) for outcome, count in self._counts.items()}


def _choose(serving: FleetView) -> tuple[str, ReplicaView | None]:
    """Which of these, the key's first choice first, takes a call now, and as what; None if all are full."""
    if not serving:
        return "spilled", None
    first, second = serving[0], serving[min(1, len(serving) - 1)]
    if first.has_slot and first.utilization <= second.utilization + MARGIN:
        return "preferred", first
    if second.has_slot:
        return "second", second
    open_ones = (r for r in serving if r.has_slot)
    return "spilled", min(open_ones, key=lambda r: (r.utilization, r.replica_id), default=None)


def _sizes(view: FleetView) -> Sizes:
    return tuple((replica.replica_id, replica.capacity) for replica in view)


def _ranking(sizes: Sizes, key: str) -> tuple[str, ...]:
    """Ids of replicas of these capacities, the key's first choice first."""
    return tuple(name for _, name in sorted(((_score(*size, key), size[0]) for size in sizes), reverse=True))


def _score(replica_id: str, capacity: int, key: str) -> float:
    digest = blake2b(f"{replica_id}\0{key}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 1) / (2.0**64 + 2)
    return -capacity / math.log(uniform) if uniform < 1 else math.inf
