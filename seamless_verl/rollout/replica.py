"""One replica as the fleet keeps it, and the slots that calls hold on it.

Invariants:
- A lease counts against its replica from the moment it is granted until it is released or the replica
  drops it, whichever comes first, and then never again.
- A replica that is LENT, STALE or DEAD has no lease; its version is known only while SERVING or PAUSED.
- A replica that died stays dead: the process started in its place is another object under the same id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from seamless_verl.rollout.engine import Engine, ReplicaControl
from seamless_verl.rollout.replica_state import (
    PAUSED,
    SYNCING,
    VERSIONED,
    WITHOUT_CALLS,
    ReplicaState,
    check_transition,
)
from seamless_verl.rollout.routing import ReplicaView


@dataclass(eq=False)
class Lease:
    """A call's slot on a replica."""

    replica: Replica
    released: Callable[[Lease], None]
    pauses: int

    @property
    def attached(self) -> bool:
        return self in self.replica.leases

    @property
    def engine(self) -> Engine:
        return self.replica.engine

    @property
    def unexplained(self) -> bool:
        """Whether a cut was nobody's doing: the replica serves, and has served since the lease was granted."""
        return self.replica.state is ReplicaState.SERVING and self.replica.pauses == self.pauses

    def release(self) -> None:
        """Gives the slot back; again changes nothing."""
        self.released(self)


@dataclass(eq=False)
class Replica:
    """One replica; `command` is what its control is busy with, and `lock` keeps one operation at a time. `resuming`:
    its control was told to go on, and is about to answer."""

    replica_id: str
    engine: Engine
    control: ReplicaControl
    capacity: int
    state: ReplicaState = ReplicaState.STALE
    version: int | None = None
    pauses: int = 0
    resuming: bool = False
    given_up: bool = False  # it did not obey in time: it may live, but nobody waits for it again
    leases: set[Lease] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    command: asyncio.Task[Any] | None = None

    @property
    def view(self) -> ReplicaView:
        starting = self.resuming and self.state in (PAUSED, SYNCING)
        return ReplicaView(self.replica_id, self.state, self.version, len(self.leases), self.capacity, starting)

    def move(self, state: ReplicaState, by: str, version: int | None = None) -> int:
        """Changes the state by that operation, and tells how many leases it dropped.

        Raises:
            ReplicaStateError: the operation cannot lead there from the present state; nothing changed.
        """
        check_transition(self.replica_id, self.state, state, by)
        self.state = state
        self.pauses += state is ReplicaState.PAUSED
        if state not in VERSIONED:
            self.version = None
        elif version is not None:
            self.version = version
        return self._drop() if state in WITHOUT_CALLS else 0

    def _drop(self) -> int:
        dropped = len(self.leases)
        self.leases.clear()
        return dropped
