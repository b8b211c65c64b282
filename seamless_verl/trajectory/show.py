"""A session's tree as text: tokens, versions, masks, drift."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from seamless_verl.trajectory.drift import Decode, Drift, drifts_of
from seamless_verl.trajectory.policies import TokenPolicy
from seamless_verl.trajectory.sequences import NO_LIMITS, ChainDecision, SequenceLimits, decide_chain, partition
from seamless_verl.trajectory.session import SessionRecord
from seamless_verl.trajectory.tree import Node, Tree

Notes = dict[Node, str]


def show(
    session: SessionRecord,
    policy: TokenPolicy,
    trainer_version: int,
    limits: SequenceLimits = NO_LIMITS,
    *,
    decode: Decode | None = None,
) -> str:
    """The tree as it would be trained now: a line for each node, forks indented, then the drift of each turn.

    A generated node shows how many of its tokens are trained and why the others are not; a leaf path
    that trains something shows its sequence's size after its last trained node. `decode` is for `drifts_of`.
    """
    tree = session.tree
    notes = _notes(tree, policy, trainer_version, limits)
    state = session.closed or "open"
    rewards = "".join(f" {name}={value:g}" for name, value in session.rewards.items())
    head = f"session {session.name} {state}{rewards}: {len(tree.turns)} turns, {tree.generated} tokens generated"
    return "\n".join([head, *_lines(tree, notes), *map(drift_line, drifts_of(tree, decode=decode))])


def drift_line(drift: Drift) -> str:
    return (
        f"drift: {drift.turn_id} left {drift.departed} at token {drift.at_token} ({drift.cause}): "
        f"{drift.lost_tokens} generated tokens no longer its context, {drift.kept_tokens} still are; "
        f"recorded {list(drift.recorded_ids)}, replayed {list(drift.replayed_ids)}"
    )


def _notes(tree: Tree, policy: TokenPolicy, trainer_version: int, limits: SequenceLimits) -> Notes:
    parts = partition(tree)
    notes = {node: f"trained 0/{len(node)} {reason}" for node, reason in parts.unused}
    for chain in parts.chains:
        notes.update(_chain_notes(decide_chain(chain, policy, trainer_version, limits)))
    return notes


def _chain_notes(fate: ChainDecision) -> Notes:
    chain, reasons = fate.chain, "+".join(sorted(+fate.dropped))
    notes, start = {}, 0
    for node in chain.response:
        if node.segment is not None:
            trained = int(np.count_nonzero(fate.keep[start : start + len(node)]))
            notes[node] = f"trained {trained}/{len(node)}" + (f" {reasons}" if trained < len(node) else "")
        start += len(node)
    if fate.keep.any():
        prompt = sum(len(node) for node in chain.prompt)
        notes[chain.response[-1]] += f"  => sequence {chain.leaf_id}: prompt {prompt}, response {len(fate.keep)}"
    return notes


def _lines(tree: Tree, notes: Notes) -> Iterator[str]:
    """A lone child stands below its parent; the children of a fork stand indented behind branches."""
    stack = _children(tree.root, "")
    while stack:
        node, first, indent = stack.pop()
        yield first + _text(node, notes)
        stack.extend(_children(node, indent))


def _children(node: Node, indent: str) -> list[tuple[Node, str, str]]:
    children = node.children
    if len(children) == 1:
        return [(children[0], indent, indent)]
    last = [(child, indent + "`- ", indent + "   ") for child in children[-1:]]
    return last + [(child, indent + "|- ", indent + "|  ") for child in reversed(children[:-1])]


def _text(node: Node, notes: Notes) -> str:
    if node.segment is None:
        return f"context {len(node)}"
    segment = node.segment
    return f"generated {len(node)} by {node.turn_id} v{segment.version} on {segment.replica}: {notes[node]}"
