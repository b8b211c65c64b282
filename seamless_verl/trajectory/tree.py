"""A tree's nodes: runs of tokens, their splitting and comparing.

The trajectory tree: a session's turns merged by longest common token prefix.

Invariants:
- The path from the root to a turn's `prompt_end` spells its prompt, and from there to its `end` what it generated.
- A node is context, or one segment's tokens of exactly one turn; generated tokens are never merged with others,
  equal or not, so each keeps its own logprob and version.
- Two context children of one node begin with different tokens.
- A split keeps the node that was there as the lower part: whoever refers to a node refers to its end for good.
- Children stand in the order in which they came.

Held per token: 4 bytes of context, 8 generated. A turn's prompt is not kept, it is read off the tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seamless_verl.errors import IntegrityError
from seamless_verl.trajectory.records import TOKEN, Finish, Segment, Turn


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


@dataclass(eq=False, slots=True)
class PlacedTurn:
    """A turn in its tree. `joined`: the node at whose end its prompt left what was already on record."""

    turn_id: str
    order: int
    joined: Node
    prompt_end: Node
    end: Node
    generated: int
    finish: Finish
    request: dict[str, Any]
    reply: dict[str, Any]

    def prompt_ids(self) -> array[int]:
        return spelled(self.prompt_end.up_to(None))

    def generated_nodes(self) -> list[Node]:
        return self.end.up_to(self.prompt_end)

    def generated_ids(self) -> array[int]:
        return spelled(self.generated_nodes())


@dataclass(eq=False)
class Tree:
    """Turns by id, in the order in which they were inserted, and the root above them all."""

    root: Node = field(default_factory=lambda: Node(array(TOKEN), None))
    turns: dict[str, PlacedTurn] = field(default_factory=dict)

    def insert(self, turn: Turn) -> PlacedTurn:
        """Places a turn that is not yet in the tree; costs its prompt's comparison and its new tokens."""
        node, within, depth = self.match(turn.prompt_ids)
        joined = node if within == len(node) else split(node, within)
        prompt_end = joined.add(turn.prompt_ids[depth:]) if depth < len(turn.prompt_ids) else joined
        end = prompt_end
        for segment in turn.segments:
            if len(segment):
                end = end.add(segment.ids, segment, turn.turn_id)
        request = self.sharing(turn.request, joined)
        placed = PlacedTurn(
            turn.turn_id, len(self.turns), joined, prompt_end, end, turn.generated, turn.finish, request, turn.reply
        )
        self.turns[turn.turn_id] = placed
        return placed

    def match(self, prompt: array[int]) -> tuple[Node, int, int]:
        """(node, tokens agreed within it, tokens agreed in all) for the deepest agreement from the root.

        Of equally deep ones, the most recently generated.
        """
        data, size = prompt.tobytes(), len(prompt)
        best, found = (self.root, 0, 0), 0
        stack = [(self.root, 0)]
        while stack and found < size:
            node, depth = stack.pop()
            agreed = agreement(node.ids, prompt, depth)
            depth += agreed
            if agreed == len(node):
                node, depth = descended(node, depth, data)
                agreed = len(node)
                if depth < size:
                    stack.extend((child, depth) for child in candidates(node, prompt[depth]))
            if depth > found:
                best, found = (node, agreed, depth), depth
        return best

    def sharing(self, request: dict[str, Any], joined: Node) -> dict[str, Any]:
        """The request, holding an earlier turn's own objects where they are equal, so that text is held once."""
        earlier = self.turns.get(joined.turn_id) or next(reversed(self.turns.values()), None)
        return _shared(request, earlier.request) if earlier else request

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first, children in order."""
        stack = self.root.children[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    @property
    def generated(self) -> int:
        """Tokens generated, counted over turns."""
        return sum(turn.generated for turn in self.turns.values())

    def check_integrity(self) -> None:
        """Raises IntegrityError where turns and nodes do not tell the same."""
        in_nodes = dict.fromkeys(self.turns, 0)
        for node in self.nodes():
            if node.segment is not None:
                if node.ids != node.segment.ids:
                    raise IntegrityError(f"ids of a node of turn {node.turn_id}", len(node), len(node.segment))
                in_nodes[node.turn_id] += len(node)
        for turn_id, turn in self.turns.items():
            on_path = sum(len(node) for node in turn.generated_nodes() if node.turn_id == turn_id)
            for found in (on_path, in_nodes[turn_id]):
                if found != turn.generated:
                    raise IntegrityError(f"tokens generated by turn {turn_id}", turn.generated, found)


def _shared(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    held = {key: old[key] if key in old and old[key] == value else value for key, value in new.items()}
    messages, earlier = new.get("messages"), old.get("messages")
    if isinstance(messages, list) and isinstance(earlier, list):
        pairs = zip(messages, earlier, strict=False)
        held["messages"] = [b if a == b else a for a, b in pairs] + messages[len(earlier) :]
    return held
