"""The states of a replica, and the operations that lead from one to another."""

from __future__ import annotations

from enum import StrEnum

from seamless_verl.errors import ReplicaStateError


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

DURING_LOAD = frozenset(
    {
        (SERVING, PAUSED),  # the load begins; or it has ended, and training has the device
        (PAUSED, SYNCING),  # the load begins
        (STALE, SYNCING),  # the load begins
        (SYNCING, SERVING),  # its own load has ended, and perhaps not that of another of the same command
        (SYNCING, STALE),  # it could not load
        *((state, DEAD) for state in ReplicaState if state is not DEAD),  # its load is interrupted
        (DEAD, STALE),  # another process is attached in its place
    }
)
"""What may happen to a replica from the begin of `RolloutManager.update_weights` to its end, beside others' commands.

One that is reconnected meanwhile is in the state in which it is found, and is loaded again before the end. All other
commands for it wait for the end, and training gets its device after that. A commit waits for all loads, so that none
ends with weights older than the committed ones.
"""

WITHOUT_CALLS = frozenset({RELEASED, STALE, DEAD})
VERSIONED = frozenset({SERVING, PAUSED})  # weights of a known, committed version


def check_transition(replica: str, found: ReplicaState, wanted: ReplicaState, operation: str) -> None:
    """Raises ReplicaStateError unless this operation leads from the one state to the other."""
    if LEGAL.get((found, wanted), ("", ""))[0] != operation:
        legal = "; ".join(f"{to} by {how} ({why})" for (source, to), (how, why) in LEGAL.items() if source is found)
        raise ReplicaStateError(replica, found, f"{wanted} by {operation}", legal)
