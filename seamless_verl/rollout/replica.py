"""One replica of the fleet: its states, how routing sees it, and the slots that calls hold on it.

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
from enum import StrEnum
from typing import Any

from seamless_verl.errors import ReplicaStateError
from seamless_verl.rollout.engine import Engine, ReplicaControl


class ReplicaState(StrEnum):
    """Whether a replica generates, and with which weights."""

    SERVING = "serving"
    """it generates, with committed weights"""
    PAUSED = "paused"
    """it does not generate; its weights are unchanged"""
    SYNCING = "syncing"
    """its weights are being replaced"""
    RELEASED = "released"
    """its memory is released: training has its device"""
    STALE = "stale"
    """it runs with weights of unknown version: it needs new ones before it serves"""
    DEAD = "dead"
    """its process or its connection is gone"""


SERVING, PAUSED, SYNCING, RELEASED, STALE, DEAD = ReplicaState

# (from, to): the operation that leads there, and what it means
LEGAL: dict[tuple[ReplicaState, ReplicaState], tuple[str, str]] = {
    (SERVING, PAUSED): ("pause", "generation stops for a while"),
    (PAUSED, SERVING): ("resume", "nothing has changed while it was paused"),
    (PAUSED, SYNCING): ("begin_sync", "weights change only while nothing is generated"),
    (PAUSED, RELEASED): ("release", "its calls have been cut, its memory may be released"),
    (SYNCING, SERVING): ("end_sync", "it has the committed weights"),
    (SYNCING, STALE): ("fail_sync", "its weights may be of two versions"),
    (STALE, SYNCING): ("begin_sync", "it gets new weights"),
    (STALE, RELEASED): ("release", "its memory is released before it got new weights"),
    (RELEASED, STALE): ("reclaim", "its memory is back, its weights are not"),
    **{(state, DEAD): ("lost", "its process or its connection is gone") for state in ReplicaState if state is not DEAD},
    (DEAD, STALE): ("add", "another process runs in its place, with weights of unknown version"),
}

WITHOUT_CALLS = frozenset({RELEASED, STALE, DEAD})
VERSIONED = frozenset({SERVING, PAUSED})  # weights of a known, committed version


def check_transition(replica: str, found: ReplicaState, wanted: ReplicaState, operation: str) -> None:
    """Raises ReplicaStateError unless this operation leads from the one state to the other."""
    if LEGAL.get((found, wanted), ("", ""))[0] != operation:
        legal = "; ".join(f"{to} by {how} ({why})" for (source, to), (how, why) in LEGAL.items() if source is found)
        raise ReplicaStateError(replica, found, f"{wanted} by {operation}", legal)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as a policy sees it; load and capacity in calls.

    `starting`: it will serve in a moment; `expected`: when it has loaded the committed weights. While it is `outdated`
    (a newer version is committed) or `training` has its device, it takes no calls; those that it has continue.
    """

    replica_id: str
    state: ReplicaState
    version: int | None
    load: int
    capacity: int
    starting: bool = False
    expected: bool = False
    outdated: bool = False
    training: bool = False

    @property
    def utilization(self) -> float:
        """The share of its capacity in use, 0 to 1, by which replicas of different size are compared."""
        return self.load / self.capacity

    @property
    def has_slot(self) -> bool:
        """Whether it takes one more call."""
        return self.open and self.load < self.capacity

    @property
    def open(self) -> bool:
        """Whether it takes calls as soon as it has room."""
        return self.state is ReplicaState.SERVING and not self.outdated and not self.training

    @property
    def available(self) -> bool:
        """Whether it takes calls as soon as it has room, or will soon."""
        return self.open or self.coming

    @property
    def coming(self) -> bool:
        """Whether it does not serve yet, but will soon."""
        return self.starting or self.expected


@dataclass(frozen=True, slots=True)
class WaitingReplica:
    """A replica at one moment: for how many seconds it is in its state, and its control owes a reply, if it does."""

    replica_id: str
    state: ReplicaState
    state_s: float
    command_s: float | None


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
    """One replica, with slots for `capacity` calls, of which `slots` are taken.

    `command` is its control's running command; `lock` makes operations follow each other.
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
    expected: bool = False  # it will have the committed weights soon: calls may wait for it (slots.py)
    training: bool = False  # training has its device: it takes no calls, also where it serves for a moment
    slots: set[Slot] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    since: float = field(default_factory=lambda: time.monotonic())
    command: asyncio.Task[Any] | None = None
    commanded: float = 0.0
    late: asyncio.Task[Any] | None = None  # the command that did not end in time: it may be alive, as its end shows

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

    def waiting(self, now: float) -> WaitingReplica:
        owed_s = None if self.command is None else now - self.commanded
        return WaitingReplica(self.replica_id, self.state, now - self.since, owed_s)

    def move(self, state: ReplicaState, operation: str, version: int | None = None) -> int:
        """Changes the state by this operation; returns how many slots were dropped, or raises ReplicaStateError."""
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
        dropped = len(self.slots) if state in WITHOUT_CALLS else 0
        if dropped:
            self.slots.clear()
        return dropped
