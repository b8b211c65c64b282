"""A tree's nodes: runs of tokens, their splitting and comparing."""

from __future__ import annotations

from array import array

import numpy as np

from seamless_verl.trajectory.records import TOKEN, Segment


class Node:
    """A run of tokens: context, or (a part of) one segment of one turn."""

    __slots__ = ("children", "ids", "parent", "segment", "turn_id")

    def __init__(self, ids: array[int], parent: Node | None, segment: Segment | None = None, turn_id: str = "") -> None:
        self.ids, self.parent, self.segment, self.turn_id = ids, parent, segment, turn_id
        self.children: list[Node] = []

    def __len__(self) -> int:
        return len(self.ids)

    def __bool__(self) -> bool:
        return True

    def add(self, ids: array[int], segment: Segment | None = None, turn_id: str = "") -> Node:
        child = Node(ids, self, segment, turn_id)
        self.children.append(child)
        return child

    def up_to(self, top: Node | None) -> list[Node]:
        """The nodes below `top` on the way to this one, which is last; `top` None means from the root on, it included.

        Raises:
            LookupError: `top` is not above this node.
        """
        way: list[Node] = []
        node: Node | None = self
        while node is not top:
            if node is None:
                raise LookupError("the node is not below the other")
            way.append(node)
            node = node.parent
        return way[::-1]


def spelled(nodes: list[Node]) -> array[int]:
    """The tokens of the nodes, one after another."""
    whole = array(TOKEN)
    for node in nodes:
        whole.extend(node.ids)
    return whole


def candidates(node: Node, token: int) -> list[Node]:
    """Children that begin with the token, the latest last; the one that is context, if any, is the first.

    For context that begins like a generated child would have been matched to that child.
    """
    return [child for child in node.children if child.ids[0] == token]


def descended(node: Node, depth: int, prompt: bytes) -> tuple[Node, int]:
    """Goes on down from a node that ends at `depth` while there is one child only, and it agrees whole."""
    width = node.ids.itemsize
    while len(node.children) == 1:
        # compared as bytes: most nodes of a replayed conversation agree whole, and this costs least to see
        ids = node.children[0].ids
        if not prompt.startswith(ids, width * depth):
            break
        node, depth = node.children[0], depth + len(ids)
    return node, depth


def agreement(ids: array[int], prompt: array[int], start: int) -> int:
    """How many leading `ids` are what `prompt` holds from `start` on."""
    size = min(len(ids), len(prompt) - start)
    differs = np.asarray(ids)[:size] != np.asarray(prompt)[start : start + size]
    return int(differs.argmax()) if differs.any() else size


def split(lower: Node, at: int) -> Node:
    """Puts a node for the first `at` tokens above this one, which keeps the rest; returns the upper one."""
    parent, segment = lower.parent, lower.segment
    assert parent is not None and 0 < at < len(lower)
    first, rest = (None, None) if segment is None else (cut(segment, 0, at), cut(segment, at, len(segment)))
    upper = Node(lower.ids[:at] if first is None else first.ids, parent, first, lower.turn_id)
    lower.ids, lower.segment = lower.ids[at:] if rest is None else rest.ids, rest
    parent.children[parent.children.index(lower)] = upper
    upper.children.append(lower)
    lower.parent = upper
    return upper


def cut(segment: Segment, start: int, stop: int) -> Segment:
    return Segment(segment.ids[start:stop], segment.logprobs[start:stop], segment.version, segment.replica)
