"""The roster: which replicas there are, who may serve, and which calls are with whom.

Invariants:
- A call is granted a slot only on a replica that is SERVING, with weights that were committed, and has room.
- Leases granted = given back + dropped with their replica + attached; an attached one is with a replica that
  is SERVING, PAUSED or SYNCING.
- Nobody stands in line while a serving replica has room, but who waits for its home, which is about to serve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from seamless_verl.errors import IntegrityError, ReplicaVersionError
from seamless_verl.rollout.engine import Engine, ReplicaControl
from seamless_verl.rollout.replica import Lease, Replica
from seamless_verl.rollout.routing import ReplicaView, RoutingPolicy
from seamless_verl.rollout.states import DEAD, SERVING, STALE, VERSIONED, WITHOUT_CALLS, ReplicaState
from seamless_verl.rollout.waiting import Line

OnChange: TypeAlias = Callable[[ReplicaView, str], None]  # the replica after the change, and why


class Roster:
    """The replicas and the slots on them; `on_change` hears of each change of a replica's state. A call in line
    is passed by none that came more than `overtaking` calls later."""

    def __init__(
        self, *, policy: RoutingPolicy, committed: int = 0, on_change: OnChange | None = None, overtaking: int = 256
    ) -> None:
        self._policy, self._committed, self._on_change = policy, committed, on_change
        self._replicas: dict[str, Replica] = {}
        self._line = Line(overtaking)
        self._granted = self._given_back = self._dropped = 0

    @property
    def committed(self) -> int:
        return self._committed

    @property
    def view(self) -> tuple[ReplicaView, ...]:
        return tuple(replica.view for replica in self._replicas.values())

    def metrics(self) -> dict[str, float]:
        view = self.view
        states = {f"fleet/{state}": float(sum(r.state is state for r in view)) for state in ReplicaState}
        calls = {"fleet/attached": float(sum(r.load for r in view)), "fleet/waiting": float(len(self._line))}
        return states | calls | self._policy.metrics()

    def commit(self, version: int) -> None:
        """These weights may be served from now on; raises ValueError for an older version."""
        if version < self._committed:
            raise ValueError(f"version={version} is older than the committed {self._committed}; commit a newer one")
        self._committed = version

    def add(
        self, replica_id: str, *, engine: Engine, control: ReplicaControl, capacity: int, version: int | None = None
    ) -> None:
        """A new replica, or a process in place of a dead one; STALE unless it says it has the committed version.

        Raises:
            ValueError: the id is taken, or it has no room for a call.
            ReplicaVersionError: it comes with another version than the committed one.
        """
        if version is not None and version != self._committed:
            raise ReplicaVersionError(replica_id, version, self._committed)
        state = STALE if version is None else SERVING
        self._put(Replica(replica_id, engine, control, capacity, state, version), "added")

    def restore(
        self,
        replica_id: str,
        *,
        engine: Engine,
        control: ReplicaControl,
        capacity: int,
        state: ReplicaState,
        version: int | None,
    ) -> None:
        """A replica as it was found when contact with it was had again, by this process or the next one.

        Raises:
            ValueError: the id is taken, it has no room for a call, or the state does not go with the version.
            ReplicaVersionError: its version is newer than the committed one.
        """
        if (version is not None) != (state in VERSIONED):
            raise ValueError(f"replica {replica_id}: version={version} of one that is {state}")
        if version is not None and version > self._committed:
            raise ReplicaVersionError(replica_id, version, self._committed)
        self._put(Replica(replica_id, engine, control, capacity, state, version), "restored")

    def lost(self, replica_id: str, reason: str, *, engine: Engine | None = None) -> None:
        """The replica is gone, from any state; what is being done to it is interrupted, its calls go elsewhere.

        News of a replica that is DEAD already, or removed, or about an `engine` that was replaced, changes nothing.
        """
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.state is not DEAD and engine in (None, replica.engine):
            self._lose(replica, reason)

    async def acquire(self, key: str, ticket: int) -> Lease:
        """A slot on a serving replica, waiting for one if need be; `ticket` is the call's place in line."""
        if (lease := self._grant(key)) is not None:  # then nobody in line could have it
            return lease
        return await self._line.wait(key, ticket)

    def check_integrity(self) -> None:
        """Raises IntegrityError where the books do not close."""
        attached = sum(len(replica.leases) for replica in self._replicas.values())
        _equal("leases given back + dropped + attached", self._granted, self._given_back + self._dropped + attached)
        for replica in self._replicas.values():
            self._check(replica)
        homes, starting = self._policy.homes(self.view), {r.replica_id for r in self.view if r.starting}
        idle = [key for key in self._line.keys if homes(key) not in starting] if self._has_room() else []
        _equal("calls in line while there is room", 0, len(idle))

    def _check(self, replica: Replica) -> None:
        name, load = f"replica {replica.replica_id}", len(replica.leases)
        _equal(f"{name}: leases of another", 0, sum(lease.replica is not replica for lease in replica.leases))
        _equal(f"{name}: calls above its capacity", 0, max(0, load - replica.capacity))
        _equal(f"{name}: calls while {replica.state}", 0, load if replica.state in WITHOUT_CALLS else 0)
        _equal(f"{name}: known version", replica.state in VERSIONED, replica.version is not None)
        _equal(f"{name}: uncommitted versions", 0, max(0, (replica.version or 0) - self._committed))

    def _put(self, replica: Replica, why: str) -> None:
        name, capacity = replica.replica_id, replica.capacity
        if capacity < 1:
            raise ValueError(f"replica {name}: capacity={capacity}; give room for one call at least")
        if (known := self._replicas.get(name)) is not None and known.state is not DEAD:
            raise ValueError(f"replica {name} is there already, {known.state}; remove it or take another id")
        self._replicas[name] = replica
        self._changed(replica, why)

    def _of(self, replica_id: str) -> Replica:
        if replica_id not in self._replicas:
            raise ValueError(f"replica={replica_id!r} is not in the fleet; there are {sorted(self._replicas)}")
        return self._replicas[replica_id]

    def _move(self, replica: Replica, state: ReplicaState, by: str, version: int | None = None) -> None:
        self._dropped += replica.move(state, by, version)
        self._changed(replica, by)

    def _lose(self, replica: Replica, reason: str) -> None:
        self._dropped += replica.move(DEAD, "lost")
        if replica.command is not None:
            replica.command.cancel()
        replica.engine.close()
        self._changed(replica, reason)

    def _changed(self, replica: Replica, why: str) -> None:
        if self._on_change is not None:
            self._on_change(replica.view, why)
        self._serve()

    def _serve(self) -> None:
        """Slots to those in line."""
        if len(self._line) and self._has_room():
            homes = self._policy.homes(self.view)
            self._line.serve(self._grant, lambda key: self._open(homes(key)), self._has_room)

    def _has_room(self) -> bool:
        return any(map(self._open, self._replicas))

    def _open(self, replica_id: str | None) -> bool:
        return replica_id is not None and self._replicas[replica_id].view.open

    def _grant(self, key: str) -> Lease | None:
        chosen = self._policy.decide(self.view, key)
        if chosen is None:
            return None
        replica = self._of(chosen)
        assert replica.view.open, f"{type(self._policy).__name__} chose {chosen}, which is {replica.view}"
        lease = Lease(replica, self._release, replica.pauses)
        replica.leases.add(lease)
        self._granted += 1
        return lease

    def _release(self, lease: Lease) -> None:
        if lease.attached:
            lease.replica.leases.remove(lease)
            self._given_back += 1
            self._serve()

    def __iter__(self) -> Iterator[str]:
        return iter(self._replicas)


def _equal(law: str, expected: int, found: int) -> None:
    if expected != found:
        raise IntegrityError(law, expected, found)
