"""Routing policies: which serving replica runs a call.

A policy reads a frozen view and returns a replica's id, or None if no serving replica has room. It keeps only counts
of its decisions, so that restoring its state equals never having stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Protocol, TypeAlias

from seamless_verl.errors import ConfigError
from seamless_verl.rollout.replica_state import ReplicaState


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as a policy sees it; load and capacity in calls.

    `starting`: it will serve in a moment. `outdated`: a newer version is committed, and it waits for its turn in the
    update; it continues the calls that it has, and takes no others.
    """

    replica_id: str
    state: ReplicaState
    version: int | None
    load: int
    capacity: int
    starting: bool = False
    outdated: bool = False

    @property
    def utilization(self) -> float:
        """The share of its capacity in use, 0 to 1, by which replicas of different size are compared."""
        return self.load / self.capacity

    @property
    def has_room(self) -> bool:
        """Whether it takes one more call."""
        return self.state is ReplicaState.SERVING and not self.outdated and self.load < self.capacity

    @property
    def available(self) -> bool:
        """Whether it takes calls as soon as it has room, or is starting."""
        return (self.state is ReplicaState.SERVING and not self.outdated) or self.starting


FleetView: TypeAlias = Sequence[ReplicaView]


class RoutingPolicy(Protocol):
    """The interface of a routing policy."""

    def decide(self, view: FleetView, key: str) -> str | None:
        """The replica for a call; calls with one key prefer the same replica."""

    def preferred(self, view: FleetView) -> Callable[[str], str | None]:
        """A function from a key to its preferred replica among the available ones, None without a preference."""

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class PrefixAffinity:
    """Keeps calls of one key on one replica, whose cache has their prefix, as long as loads stay near each other.

    A key has two candidates by weighted rendezvous hashing (Thaler and Ravishankar 1998; weights by Schindelhauer and
    Schomaker 2005), so that a replica that joins or leaves moves only the keys it wins or held, and a larger one wins
    more. The first candidate is taken unless it is full, or busier than the second by more than `margin`, a share of
    capacity. Then the second is taken, and if both are full, the least loaded replica. A first candidate that is
    starting and has room is awaited: else the first of several starting replicas would get all waiting calls.
    """

    OUTCOMES = ("preferred", "second", "spilled")

    def __init__(self, *, margin: float = 0.2) -> None:
        if not 0 <= margin <= 1:
            raise ConfigError("margin", margin, "it is a share of a replica's capacity", "Give 0 to 1")
        self.margin = margin
        self._counts = dict.fromkeys(self.OUTCOMES, 0)

    def decide(self, view: FleetView, key: str) -> str | None:
        available = {replica.replica_id: replica for replica in view if replica.available}
        ranked = [available[name] for name in _ranking(_sizes(view), key) if name in available]
        serving = [replica for replica in ranked if not replica.starting]
        if not serving or (ranked[0].starting and ranked[0].load < ranked[0].capacity):
            return None
        first, second = serving[0], serving[min(1, len(serving) - 1)]
        if first.has_room and first.utilization <= second.utilization + self.margin:
            return self._count("preferred", first)
        if second.has_room:
            return self._count("second", second)
        spilled = _least_loaded(view)
        return None if spilled is None else self._count("spilled", spilled)

    def preferred(self, view: FleetView) -> Callable[[str], str | None]:
        available, sizes = {replica.replica_id for replica in view if replica.available}, _sizes(view)
        return lambda key: next((name for name in _ranking(sizes, key) if name in available), None)

    def metrics(self) -> dict[str, float]:
        return {f"routing/{outcome}": float(count) for outcome, count in self._counts.items()}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError on a state of another policy."""
        if set(state) != set(self._counts):
            raise ValueError(f"{type(self).__name__} counts {sorted(self._counts)}, but was given {sorted(state)}")
        self._counts = {outcome: int(state[outcome]) for outcome in self._counts}

    def _count(self, outcome: str, chosen: ReplicaView) -> str:
        self._counts[outcome] += 1
        return chosen.replica_id


def _least_loaded(view: FleetView) -> ReplicaView | None:
    return min((r for r in view if r.has_room), key=lambda r: (r.utilization, r.replica_id), default=None)


def _sizes(view: FleetView) -> tuple[tuple[str, int], ...]:
    return tuple((replica.replica_id, replica.capacity) for replica in view)


@lru_cache(maxsize=32_768)  # a conversation asks at every turn, and while it waits
def _ranking(sizes: tuple[tuple[str, int], ...], key: str) -> tuple[str, ...]:
    """Ids of replicas of these capacities, the key's first choice first."""
    return tuple(name for _, name in sorted(((_score(*size, key), size[0]) for size in sizes), reverse=True))


def _score(replica_id: str, capacity: int, key: str) -> float:
    digest = blake2b(f"{replica_id}\0{key}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 1) / (2.0**64 + 2)
    return -capacity / math.log(uniform) if uniform < 1 else math.inf
