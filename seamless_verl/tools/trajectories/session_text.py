"""Formats a session's tree as text: tokens, weight versions, trained tokens and drift."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from seamless_verl.tools.trajectories.drift import Decode, Drift, find_drifts
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.policies import GrammarTokens, TokenPolicy
from seamless_verl.trajectory.sequences import (
    NO_LIMITS,
    ChainDecision,
    SequenceLimits,
    mask_chain,
    split_into_chains,
)
from seamless_verl.trajectory.session import SessionRecord
from seamless_verl.trajectory.tree import Node, Tree

Annotations = dict[Node, str]


def format_session(
    session: SessionRecord,
    policy: TokenPolicy,
    trainer_version: int,
    limits: SequenceLimits = NO_LIMITS,
    *,
    grammar: GrammarTokens = GrammarTokens.MASK_FORCED,
    dropped: DropReason | None = None,
    decode: Decode | None = None,
) -> str:
    """The tree as it would be trained now: a line per node, forks indented, then the drift of each turn.

    A generated node shows how many of its tokens are trained and why the others are not. The last trained node of a
    training sequence shows the sequence's size. Of a session that was `dropped` none is trained. `decode` is for
    `find_drifts`.
    """
    tree = session.tree
    annotations = _annotate(tree, policy, trainer_version, limits, grammar, dropped)
    state = session.closed or "open"
    rewards = "".join(f" {name}={value:g}" for name, value in session.rewards.items())
    head = f"session {session.name} {state}{rewards}: {len(tree.turns)} turns, {tree.generated} tokens generated"
    return "\n".join([head, *_tree_lines(tree, annotations), *map(format_drift, find_drifts(tree, decode=decode))])


def format_drift(drift: Drift) -> str:
    return (
        f"drift: {drift.turn_id} left {drift.recorded_turn_id} at token {drift.at_token} ({drift.cause}): "
        f"{drift.lost_tokens} generated tokens no longer its context, {drift.kept_tokens} still are; "
        f"recorded {list(drift.recorded_ids)}, replayed {list(drift.replayed_ids)}"
    )


def _annotate(
    tree: Tree,
    policy: TokenPolicy,
    trainer_version: int,
    limits: SequenceLimits,
    grammar: GrammarTokens,
    dropped: DropReason | None,
) -> Annotations:
    chains, left_out = split_into_chains(tree)
    annotations = {node: f"trained 0/{len(node)} {reason}" for node, reason in left_out}
    for chain in chains:
        decision = mask_chain(chain, policy, trainer_version, limits, grammar)
        annotations.update(_annotate_chain(decision if dropped is None else _discarded(decision, dropped)))
    return annotations


def _discarded(decision: ChainDecision, dropped: DropReason) -> ChainDecision:
    trained = int(np.count_nonzero(decision.mask))
    return ChainDecision(decision.chain, np.zeros_like(decision.mask), decision.dropped + Counter({dropped: trained}))


def _annotate_chain(decision: ChainDecision) -> Annotations:
    chain, reasons = decision.chain, "+".join(sorted(+decision.dropped))
    annotations, start = {}, 0
    for node in chain.response:
        if node.segment is not None:
            trained = int(np.count_nonzero(decision.mask[start : start + len(node)]))
            annotations[node] = f"trained {trained}/{len(node)}" + (f" {reasons}" if trained < len(node) else "")
        start += len(node)
    if decision.mask.any():
        prompt, response = sum(len(node) for node in chain.prompt), len(decision.mask)
        annotations[chain.response[-1]] += f"  => sequence {chain.leaf_id}: prompt {prompt}, response {response}"
    return annotations


def _tree_lines(tree: Tree, annotations: Annotations) -> Iterator[str]:
    """An only child is printed below its parent; the children of a fork are printed as indented branches."""
    stack = _indent_children(tree.root, "")
    while stack:
        node, first_indent, indent = stack.pop()
        yield first_indent + _format_node(node, annotations)
        stack.extend(_indent_children(node, indent))


def _indent_children(node: Node, indent: str) -> list[tuple[Node, str, str]]:
    """Children, the last first: (child, indent of its own line, indent of what is below it)."""
    children = node.children
    if len(children) == 1:
        return [(children[0], indent, indent)]
    last = [(child, indent + "`- ", indent + "   ") for child in children[-1:]]
    return last + [(child, indent + "|- ", indent + "|  ") for child in reversed(children[:-1])]


def _format_node(node: Node, annotations: Annotations) -> str:
    if node.segment is None:
        return f"context {len(node)}"
    segment = node.segment
    return f"generated {len(node)} by {node.turn_id} v{segment.version} on {segment.replica}: {annotations[node]}"
