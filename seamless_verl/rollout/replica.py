"""One replica of the fleet, and the slots that calls hold on it.

Invariants:
- A slot counts for its replica from its grant until it is released or the replica drops it, whichever is first,
  and then never again.
- A replica that is RELEASED, STALE or DEAD has no slot; its version is known only while SERVING or PAUSED.
- A replica that died stays dead; a process started in its place is another object with the same id.
"""

from __future__ import annotations

import asyncio
import time
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
class Slot:
    """A call's slot on a replica. `on_pause` is called with whether the replica has stopped to generate."""

    replica: Replica
    on_release: Callable[[Slot], None]
    pauses: int
    on_pause: Callable[[bool], None] | None = None

    @property
    def attached(self) -> bool:
        return self in self.replica.slots

    @property
    def engine(self) -> Engine:
        return self.replica.engine

    @property
    def unexplained(self) -> bool:
        """Whether no command explains a cut: the replica has served ever since the slot was granted."""
        return self.replica.state is ReplicaState.SERVING and self.replica.pauses == self.pauses

    def release(self) -> None:
        """Gives the slot back; a second call changes nothing."""
        self.on_release(self)


@dataclass(eq=False)
class Replica:
    """One replica. `command` is its control's running command; `lock` makes operations follow each other.

    `since` is when it entered its state, and `commanded` when its command began, both on the monotonic clock.
    """

    replica_id: str
    engine: Engine
    control: ReplicaControl
    capacity: int
    state: ReplicaState = ReplicaState.STALE
    version: int | None = None
    pauses: int = 0
    resuming: bool = False  # its control is executing a resume
    outdated: bool = False  # it waits for its turn in a weight update: a newer version is committed
    expected: bool = False  # it will have the committed weights soon: calls may wait for it (awaited.py)
    training: bool = False  # training has its device: it takes no calls, also where it serves for a moment
    timed_out: bool = False  # its control did not reply in time: it may be alive
    slots: set[Slot] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    since: float = field(default_factory=lambda: time.monotonic())
    command: asyncio.Task[Any] | None = None
    commanded: float = 0.0
    late: asyncio.Task[Any] | None = None  # the command that did not end in time; its end is a sign of life

    @property
    def current(self) -> bool:
        """Whether it has the committed weights."""
        return self.state in VERSIONED and not self.outdated

    @property
    def view(self) -> ReplicaView:
        starting = self.resuming and self.state in (PAUSED, SYNCING) and not self.outdated and not self.training
        return ReplicaView(
            self.replica_id,
            self.state,
            self.version,
            len(self.slots),
            self.capacity,
            starting=starting,
            expected=self.expected and not self.training,
            outdated=self.outdated,
            training=self.training,
        )

    def move(self, state: ReplicaState, operation: str, version: int | None = None) -> int:
        """Changes the state by this operation; returns how many slots were dropped.

        Raises:
            ReplicaStateError: the operation does not lead from the current state to that one; nothing changed.
        """
        check_transition(self.replica_id, self.state, state, operation)
        self.state, self.since = state, time.monotonic()
        self.pauses += state is ReplicaState.PAUSED
        if state not in VERSIONED:
            self.version, self.outdated = None, False
        elif version is not None:
            self.version, self.outdated = version, False
        self.expected &= state not in WITHOUT_CALLS and not self.current
        for slot in self.slots:
            if slot.on_pause is not None:
                slot.on_pause(state is not ReplicaState.SERVING)
        return self._drop_slots() if state in WITHOUT_CALLS else 0

    def _drop_slots(self) -> int:
        dropped = len(self.slots)
        self.slots.clear()
        return dropped
