"""Which leaf path trains which generated token.

Invariants:
- A turn's token counts as unused when its turn was cancelled or failed and no later prompt replays it: no agent
  acted on it. An unused token is in no chain; every other generated token is in exactly one.
- At each fork the first child with something to train carries the chain on, the others begin chains of their own.
  So who came first keeps what is shared, and a later fork never takes tokens away from an earlier path.
- A chain's nodes follow each other; within it every generated token is its own. It ends with a generated one.
"""

from __future__ import annotations

from dataclasses import dataclass

from seamless_verl.trajectory.account import Reason
from seamless_verl.trajectory.nodes import Node
from seamless_verl.trajectory.records import Finish
from seamless_verl.trajectory.tree import Tree

UNFINISHED = {Finish.CANCELLED: Reason.CANCELLED, Finish.FAILED: Reason.FAILED}


@dataclass(frozen=True, eq=False)
class Chain:
    """One leaf path: `prompt` nodes from the root to the first token it trains, `response` nodes from there on."""

    leaf_id: str
    prompt: list[Node]
    response: list[Node]


@dataclass(frozen=True, eq=False)
class Partition:
    """All generated nodes of a tree: in `chains`, or in `unused` with the reason."""

    chains: list[Chain]
    unused: list[tuple[Node, Reason]]


def partition(tree: Tree) -> Partition:
    """Linear in the number of nodes, plus each chain's path to the root."""
    nodes = list(tree.nodes())
    replayed = _replayed(tree, nodes)
    unused: list[tuple[Node, Reason]] = []
    live: set[Node] = set()
    for node in reversed(nodes):
        reason = _unused(tree, node, replayed)
        if reason is not None:
            unused.append((node, reason))
        elif node.segment is not None or any(child in live for child in node.children):
            live.add(node)
    heads = [node for node in nodes if node in live and node is not _first(node.parent, live)]
    ids = _leaf_ids(tree)
    return Partition([_chain(head, live, ids) for head in _with_root_path(heads, tree, live)], unused[::-1])


def _with_root_path(heads: list[Node], tree: Tree, live: set[Node]) -> list[Node]:
    first = _first(tree.root, live)
    return heads if first is None else [first, *heads]


def _replayed(tree: Tree, nodes: list[Node]) -> set[Node]:
    """Nodes that some turn's prompt passes through."""
    passed = {turn.prompt_end for turn in tree.turns.values()}
    for node in reversed(nodes):
        if node in passed and node.parent is not None:
            passed.add(node.parent)
    return passed


def _unused(tree: Tree, node: Node, replayed: set[Node]) -> Reason | None:
    if node.segment is None or node in replayed:
        return None
    return UNFINISHED.get(tree.turns[node.turn_id].finish)


def _first(node: Node | None, live: set[Node]) -> Node | None:
    return next((child for child in node.children if child in live), None) if node else None


def _chain(head: Node, live: set[Node], leaf_ids: dict[Node, str]) -> Chain:
    own = [head]
    while (child := _first(own[-1], live)) is not None:
        own.append(child)
    start = next(i for i, node in enumerate(own) if node.segment is not None)
    leaf = own[-1]
    while leaf.children:
        leaf = leaf.children[0]
    above = head.parent.up_to(None) if head.parent else []
    return Chain(leaf_ids[leaf], above + own[:start], own[start:])


def _leaf_ids(tree: Tree) -> dict[Node, str]:
    """The first turn that ends at each node where one does; every leaf is such a node."""
    return {turn.end: turn_id for turn_id, turn in reversed(tree.turns.items())}
