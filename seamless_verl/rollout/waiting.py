"""How long replicas and calls wait at one moment, for the watchdog. Pure data; times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from seamless_verl.rollout.replica_state import ReplicaState


@dataclass(frozen=True, slots=True)
class WaitingReplica:
    """A replica: for how long it is in its state, and for how long its control owes a reply; None if it owes none."""

    replica_id: str
    state: ReplicaState
    state_s: float
    command_s: float | None


class CallWait(NamedTuple):
    """A call of the session `key` and the prompt `group`: since its last token, or since it waits for a slot.

    `replica` is where it has a slot, "" while it waits for one.
    """

    call_id: str
    key: str
    group: str
    replica: str
    waited_s: float
