"""The graph of waits: who waits for whom, and which node holds the others up.

A node is a part of a run that waits: the trainer, a group, a session, a call, a replica, a command, a commit. An edge
leads to what it waits for. What holds a node up is found by following the edges to a node that waits for nothing, or
to nodes that wait for each other.

Invariants:
- For each node over its limit something is found that holds it up, and the chain to it has only edges of the graph.
- The last node of a chain waits for nothing that is known, unless the chain is a cycle: then it waits for another node
  of the chain.
- A node that is over its own limit is blamed before one that is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

TRAINER, QUEUE = "the trainer", "TransferQueue"
"""Names of nodes of which a run has one."""


class WaitKind(StrEnum):
    """What kind of node waits."""

    TRAINER = "trainer"
    """the trainer's thread, in a stage"""
    GROUP = "group"
    """a group of sessions that has not been handed over, since it began"""
    SESSION = "session"
    """an open session of the gateway, since its last call ended, or that call's wait"""
    CALL = "call"
    """a call on a replica that serves, since its last token"""
    HELD_CALL = "held_call"
    """a call that no replica works on: it waits for a slot, or its replica is paused"""
    REPLICA = "replica"
    """a replica that serves, since one of its calls got a token"""
    IDLE_REPLICA = "idle_replica"
    """a replica that does not serve, since it is in that state"""
    SERVER = "server"
    """the server of a replica, since it was asked or told something and has not replied"""
    COMMAND = "command"
    """a command of the trainer to the replicas, such as a hand-over of devices, since it was given"""
    COMMIT = "commit"
    """a version of the weights that is staged, sent and loaded, since that began"""
    QUEUE = "queue"
    """TransferQueue, since it was given rows that it does not have yet"""
    ACTOR = "actor"
    """another actor, since it was asked something and has not replied"""
    COMPUTING = "computing"
    """a worker of the trainer, which does not reply while it computes, since it was asked something"""


Limits = Mapping[WaitKind, float | None]
"""Seconds by kind; None, or no entry, is no limit."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A node: `name`, which no other one has, has waited `waited_s` seconds for the nodes `on`, by their names.

    `what` completes "which ... for 3 s", for one that waits for nothing known; of the trainer it is the stage. Times of
    several processes are compared, so that they are durations.
    """

    kind: WaitKind
    name: str
    waited_s: float
    on: tuple[str, ...] = ()
    what: str = "waits"


@dataclass(frozen=True)
class Blocked:
    """What holds a node up. Each node of `chain` waits for the next; in a cycle the last one waits for `returns_to`."""

    chain: tuple[Wait, ...]
    limits: Limits
    returns_to: str | None = None

    @property
    def culprit(self) -> Wait:
        return self.chain[-1]

    @property
    def over(self) -> Wait:
        """The last node of the chain that is over its limit; its first one if none is."""
        return next((wait for wait in reversed(self.chain) if is_over(wait, self.limits)), self.chain[0])

    def __str__(self) -> str:
        first, *rest = map(_label, self.chain)
        line = f"{first} waits for {' -> '.join(rest)}" if rest else first
        seconds = f"for {self.culprit.waited_s:.0f} s"
        if self.returns_to is not None:
            return f"{line} -> {self.returns_to}: they wait for each other, {seconds}"
        what = "has been at this stage" if self.culprit.kind is WaitKind.TRAINER else self.culprit.what
        return f"{line}{', which' if rest else ''} {what} {seconds}"


def _label(wait: Wait) -> str:
    return f"{wait.name} ({wait.what})" if wait.kind is WaitKind.TRAINER else wait.name


def is_over(wait: Wait, limits: Limits) -> bool:
    """Whether the node has waited for longer than its limit."""
    limit = limits.get(wait.kind)
    return limit is not None and wait.waited_s > limit


def merge(waits: Iterable[Wait]) -> list[Wait]:
    """One node for each name, of what several processes say of it.

    It waits for all that any of them knows. A replica that works for one of them works, so that its shortest wait
    counts; of other nodes it is the longest.
    """
    merged: dict[str, Wait] = {}
    for wait in waits:
        if (known := merged.get(wait.name)) is None:
            merged[wait.name] = wait
            continue
        counts = min if wait.kind in (WaitKind.REPLICA, WaitKind.IDLE_REPLICA) else max
        chosen = counts(known, wait, key=lambda one: one.waited_s)
        merged[wait.name] = replace(chosen, on=tuple(dict.fromkeys([*known.on, *wait.on])))
    return list(merged.values())


def find_blocked(waits: Sequence[Wait], limits: Limits) -> list[Blocked]:
    """What holds up the nodes that are over their limits: one chain for each last node that is over its own.

    A chain begins with the trainer if that waits for it.
    """
    nodes = {wait.name: wait for wait in waits}
    found: dict[str, Blocked] = {}
    for start in sorted((wait for wait in waits if is_over(wait, limits)), key=lambda one: -one.waited_s):
        blocked = follow(nodes, start, limits)
        known = found.get(blocked.over.name)
        if known is None or len(known.chain) < len(blocked.chain):
            found[blocked.over.name] = blocked
    return [_from_trainer(nodes, blocked) for blocked in found.values()]


def follow(nodes: Mapping[str, Wait], start: Wait, limits: Limits) -> Blocked:
    """What holds `start` up: among the nodes that it waits for at last, one over its limit, else a cycle, else the one
    that has waited for the longest time."""
    reached = _reach(nodes, start)
    ends = [nodes[name] for name in reached if not _known(nodes, nodes[name])]
    over = [end for end in ends if is_over(end, limits)]
    if not over and (cycle := _find_cycle(nodes, start)) is not None:
        return Blocked(tuple(nodes[name] for name in cycle[:-1]), limits, cycle[-1])
    end = max(over or ends, key=lambda one: one.waited_s)
    return Blocked(_chain(nodes, reached, end), limits)


def _known(nodes: Mapping[str, Wait], wait: Wait) -> list[str]:
    """What it waits for, of what is in the graph."""
    return [name for name in wait.on if name in nodes]


def _reach(nodes: Mapping[str, Wait], start: Wait) -> dict[str, str | None]:
    """The names of all nodes that `start` waits for, and its own; each with the node before it on a shortest way."""
    before: dict[str, str | None] = {start.name: None}
    coming = deque([start.name])
    while coming:
        name = coming.popleft()
        for after in _known(nodes, nodes[name]):
            if after not in before:
                before[after] = name
                coming.append(after)
    return before


def _chain(nodes: Mapping[str, Wait], before: Mapping[str, str | None], end: Wait) -> tuple[Wait, ...]:
    names = list[str]()
    name: str | None = end.name
    while name is not None:
        names.append(name)
        name = before[name]
    return tuple(nodes[name] for name in reversed(names))


def _find_cycle(nodes: Mapping[str, Wait], start: Wait) -> list[str] | None:
    """A way from `start` that ends at one of its own nodes; None if there is none."""
    way, ended = [start.name], set[str]()
    branches = [iter(_known(nodes, start))]
    while branches:
        if (name := next(branches[-1], None)) is None:
            branches.pop()
            ended.add(way.pop())
        elif name in way:
            return [*way, name]
        elif name not in ended:
            way.append(name)
            branches.append(iter(_known(nodes, nodes[name])))
    return None


def _from_trainer(nodes: Mapping[str, Wait], blocked: Blocked) -> Blocked:
    """With the way from the trainer in front, if the trainer waits for it."""
    first = blocked.chain[0]
    if TRAINER not in nodes or TRAINER in {wait.name for wait in blocked.chain}:
        return blocked
    reached = _reach(nodes, nodes[TRAINER])
    if first.name not in reached:
        return blocked
    way = _chain(nodes, reached, first)
    members = {wait.name for wait in blocked.chain[1:]}
    return blocked if members & {wait.name for wait in way} else replace(blocked, chain=(*way, *blocked.chain[1:]))
