"""What a data plane knows of the graph of waits: its groups, sessions, calls, replicas, servers and open commands.

A group has one chain in it, that of its session which has waited for the longest time: it ends the group's wait.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from seamless_verl.rollout.call import Calls
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.observation import CallWait
from seamless_verl.rollout.replica import DEAD, SERVING, ReplicaState, WaitingReplica
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
    """The waits of this data plane now. Of thousands of calls nodes are made only of those that are in a chain."""
    replicas, calls = state.fleet.waiting_replicas(), state.calls.waits()
    groups = _longest_of_groups(state, replicas, calls)
    longest = heapq.nlargest(MAX_GROUPS, groups.items(), key=lambda item: item[1].waited_s)
    waits = [*_replica_waits(state, replicas, calls), *_command_waits(state, replicas)]
    waits += [wait for uid, one in longest for wait in _chain(uid, one, replicas)]
    return PlaneWaits(waits, len(longest) == len(groups))


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


class _Longest(NamedTuple):
    """What a group waits for: a call, None if an agent has none, of a session, "" where that is not known."""

    waited_s: float
    session: str
    call: CallWait | None = None


def _longest_of_groups(
    state: PlaneState, replicas: Iterable[WaitingReplica], calls: Iterable[CallWait]
) -> dict[str, _Longest]:
    """By prompt, what of its group has waited for the longest time; a call not before its replica served."""
    serving_s = {one.replica_id: one.state_s for one in replicas if one.state is SERVING}
    groups = dict[str, _Longest]()
    for call in calls:
        waited = min(call.waited_s, serving_s.get(call.replica, math.inf))
        uid = state.uids.get(call.key, "")
        if (name := uid or call.group) and (name not in groups or groups[name].waited_s < waited):
            groups[name] = _Longest(waited, call.key if uid else "", call)
    for session, waited in state.quiet_s.items():
        uid = state.uids[session]
        if uid not in groups or groups[uid].waited_s < waited:
            groups[uid] = _Longest(waited, session)
    return groups


def _chain(uid: str, one: _Longest, replicas: Sequence[WaitingReplica]) -> list[Wait]:
    """The nodes of a group, its session and its call. The group's age is known to the agent loop worker."""
    nodes = list[Wait]()
    if one.call is not None:
        nodes.append(_call(one.call, one.waited_s, replicas))
    if one.session:
        on = tuple(node.name for node in nodes)
        what = "has had no call of its agent"
        nodes.append(Wait(WaitKind.SESSION, session_name(one.session), one.waited_s, on, what))
    return [*nodes, Wait(WaitKind.GROUP, group_name(uid), 0.0, (nodes[-1].name,), "has not ended")]


def _call(call: CallWait, waited_s: float, replicas: Sequence[WaitingReplica]) -> Wait:
    """One that waits for a slot waits for the replicas that serve, else for all others."""
    serving = tuple(one.replica_id for one in replicas if one.state is SERVING)
    kind = WaitKind.CALL if call.replica in serving else WaitKind.HELD_CALL
    if call.replica:
        return Wait(kind, f"call {call.call_id}", waited_s, (call.replica,), "has got no token")
    on = serving or tuple(one.replica_id for one in replicas)
    return Wait(kind, f"call {call.call_id}", waited_s, on, "has waited for a slot")


def session_name(session_id: str) -> str:
    return f"session {session_id}"


def group_name(uid: str) -> str:
    return f"group {uid}"
