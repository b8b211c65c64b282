"""What a data plane knows of the graph of waits: its groups, sessions, calls, replicas, servers and open commands.

A group has one chain in it, that of its session which has waited for the longest time: it ends the group's wait.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from seamless_verl.rollout.call import Calls
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.replica_state import DEAD, SERVING, ReplicaState
from seamless_verl.rollout.waiting import CallWait, WaitingReplica
from seamless_verl.runtime.waits import TRAINER, Wait, WaitKind

OWED_S = 2.0  # a reply that takes longer is in the graph; others are on their way
MAX_GROUPS = 1000  # whose waits are in one reply, the longest; a reply takes the event loop some 10 microseconds each
WHY_IDLE = {
    ReplicaState.PAUSED: "has been paused",
    ReplicaState.SYNCING: "has been loading weights",
    ReplicaState.RELEASED: "has released its memory",
    ReplicaState.STALE: "has waited for the next weights",
    ReplicaState.DEAD: "has been dead",
}


@dataclass(frozen=True)
class PlaneState:
    """What the waits follow from.

    `training` replicas are paused since training has their device; `commands` are open, with their seconds. `quiet_s`
    is of the sessions that have no call, by their ids, and `uids` of all sessions.
    """

    fleet: Fleet
    calls: Calls
    training: Collection[str] = ()
    commands: Mapping[str, float] = field(default_factory=dict)
    quiet_s: Mapping[str, float] = field(default_factory=dict)
    uids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlaneWaits:
    """The waits; `whole` unless there are so many groups that only those are in it that have waited for long."""

    waits: list[Wait]
    whole: bool = True


def plane_waits(state: PlaneState) -> PlaneWaits:
    """The waits of this data plane now."""
    replicas, calls = state.fleet.waiting_replicas(), state.calls.waits()
    waits = [*_replica_waits(state, replicas, calls), *_command_waits(state, replicas)]
    groups = _group_waits(state, _call_waits(replicas, calls))
    longest = heapq.nlargest(MAX_GROUPS, groups, key=lambda chain: chain[-1].waited_s)
    return PlaneWaits([*waits, *(wait for chain in longest for wait in chain)], len(longest) == len(groups))


def server_name(replica_id: str) -> str:
    return f"the server of {replica_id}"


def _replica_waits(state: PlaneState, replicas: Iterable[WaitingReplica], calls: Iterable[CallWait]) -> list[Wait]:
    """All but those that serve and have no call; the servers that owe a reply."""
    longest = dict[str, float]()
    for call in calls:
        longest[call.replica] = max(longest.get(call.replica, 0.0), call.waited_s)
    waits = list[Wait]()
    for one in replicas:
        on = tuple[str, ...]()
        if one.command_s is not None and one.command_s > OWED_S:
            on = (server_name(one.replica_id),)
            waits.append(Wait(WaitKind.SERVER, *on, one.command_s, what="has not replied"))
        if one.state is not SERVING:
            held = () if one.state is DEAD else (TRAINER,)
            waits.append(_idle(one, on or held, trains=one.replica_id in state.training))
        elif one.replica_id in longest or on:
            waited = min(longest.get(one.replica_id, math.inf), one.state_s, state.calls.token_s(one.replica_id))
            what = "has given none of its calls a token"
            waits.append(Wait(WaitKind.REPLICA, one.replica_id, waited, on, what))
    return waits


def _idle(one: WaitingReplica, on: tuple[str, ...], *, trains: bool) -> Wait:
    what = "has been paused, since training has its device," if trains else WHY_IDLE[one.state]
    return Wait(WaitKind.IDLE_REPLICA, one.replica_id, one.state_s, on, what)


def _command_waits(state: PlaneState, replicas: Iterable[WaitingReplica]) -> list[Wait]:
    """The commands that take long; they wait for the servers that owe a reply."""
    owing = tuple(server_name(one.replica_id) for one in replicas if (one.command_s or 0.0) > OWED_S)
    return [
        Wait(WaitKind.COMMAND, f"the command {name}", seconds, owing, "has not ended")
        for name, seconds in state.commands.items()
        if seconds > OWED_S
    ]


def _call_waits(replicas: Iterable[WaitingReplica], calls: Iterable[CallWait]) -> list[tuple[CallWait, Wait]]:
    """Each call, as a node; one that waits for a slot waits for the replicas that serve, else for all others."""
    by_id = {one.replica_id: one for one in replicas}
    serving = tuple(name for name, one in by_id.items() if one.state is SERVING) or tuple(by_id)
    found = list[tuple[CallWait, Wait]]()
    for call in calls:
        replica = by_id.get(call.replica)
        works = replica is not None and replica.state is SERVING
        waited = min(call.waited_s, replica.state_s) if replica is not None and works else call.waited_s
        kind = WaitKind.CALL if works else WaitKind.HELD_CALL
        what = "has got no token" if replica is not None else "has waited for a slot"
        on = serving if replica is None else (call.replica,)
        found.append((call, Wait(kind, f"call {call.call_id}", waited, on, what)))
    return found


def _group_waits(state: PlaneState, calls: Iterable[tuple[CallWait, Wait]]) -> list[list[Wait]]:
    """For each group the chain from it to the call or the agent that has waited for the longest time."""
    chains = dict[str, list[Wait]]()

    def offer(uid: str, chain: list[Wait]) -> None:
        if uid not in chains or chains[uid][-1].waited_s < chain[-1].waited_s:
            chains[uid] = chain

    for call, wait in calls:
        if call.key in state.uids:
            offer(state.uids[call.key], [_session(call.key, wait.waited_s, (wait.name,)), wait])
        elif call.group:
            offer(call.group, [wait])
    for session, seconds in state.quiet_s.items():
        offer(state.uids[session], [_session(session, seconds)])
    return [[_group(uid, chain[0]), *chain] for uid, chain in chains.items()]


def _session(session_id: str, seconds: float, on: tuple[str, ...] = ()) -> Wait:
    return Wait(WaitKind.SESSION, session_name(session_id), seconds, on, "has had no call of its agent")


def _group(uid: str, first: Wait) -> Wait:
    """Its age is known to the agent loop worker."""
    return Wait(WaitKind.GROUP, group_name(uid), 0.0, (first.name,), "has not ended")


def session_name(session_id: str) -> str:
    return f"session {session_id}"


def group_name(uid: str) -> str:
    return f"group {uid}"
