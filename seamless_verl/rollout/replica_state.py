"""The states of a replica, which may follow which, and by what operation."""

from __future__ import annotations

from enum import StrEnum

from seamless_verl.errors import ReplicaStateError


class ReplicaState(StrEnum):
    """Where a replica stands."""

    SERVING = "serving"
    """it generates, with committed weights"""
    PAUSED = "paused"
    """it stands still, its weights are as they were"""
    SYNCING = "syncing"
    """its weights are being replaced"""
    LENT = "lent"
    """its device is away, training has it"""
    STALE = "stale"
    """it runs, but with weights nobody vouches for: it must be refitted before it serves"""
    DEAD = "dead"
    """it is gone"""


SERVING, PAUSED, SYNCING, LENT, STALE, DEAD = ReplicaState

# from, to: the operation that does it, and why it may
LEGAL: dict[tuple[ReplicaState, ReplicaState], tuple[str, str]] = {
    (SERVING, PAUSED): ("pause", "generation stops for a while"),
    (PAUSED, SERVING): ("resume", "nothing has changed while it stood still"),
    (PAUSED, SYNCING): ("begin_sync", "weights change only while nothing is generated"),
    (PAUSED, LENT): ("lend", "what it ran has been cut, its device may go"),
    (SYNCING, SERVING): ("synced", "it has the committed weights"),
    (SYNCING, STALE): ("sync_failed", "its weights may be of two versions"),
    (STALE, SYNCING): ("begin_sync", "it is refitted"),
    (STALE, LENT): ("lend", "its device goes again before it was refitted"),
    (LENT, STALE): ("reclaimed", "its device is back, its weights are not"),
    **{(state, DEAD): ("lost", "its process or its connection is gone") for state in ReplicaState if state is not DEAD},
    (DEAD, STALE): ("add", "another process runs in its place, with weights of unknown version"),
}

WITHOUT_CALLS = frozenset({LENT, STALE, DEAD})
VERSIONED = frozenset({SERVING, PAUSED})  # its weights are known, and were committed


def check_transition(replica: str, found: ReplicaState, wanted: ReplicaState, by: str) -> None:
    """Raises ReplicaStateError unless that operation may lead from the one to the other."""
    if LEGAL.get((found, wanted), ("", ""))[0] != by:
        legal = "; ".join(f"{to} by {how} ({why})" for (source, to), (how, why) in LEGAL.items() if source is found)
        raise ReplicaStateError(replica, found, f"{wanted} by {by}", legal)
