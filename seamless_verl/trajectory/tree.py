"""The trajectory tree: a session's turns merged by longest common token prefix.

Invariants:
- The path from the root to a turn's `prompt_end` holds its prompt; the path from there to its `end` holds what it
  generated.
- A node is context, or tokens of one segment of exactly one turn. Generated tokens are never merged with others, even
  if they are equal, so each keeps its own logprob and version.
- Two context children of one node begin with different tokens.
- A split keeps the existing node as the lower part, so a reference to a node always means the same end.
- Children are in the order of their insertion.

- The ids of nodes are keyed by the tree's images, so that a prompt matches no other image's placeholders.
- A token keeps the route with which it was first placed; a later turn gives routes only to what has none.

Memory per token: 4 bytes of context, 8 bytes generated, and its route if there is one. A turn's prompt is not stored;
it is read from the tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seamless_verl.errors import IntegrityError
from seamless_verl.trajectory.images import ImageKeys, PromptImage
from seamless_verl.trajectory.records import TOKEN, Finish, Segment, Turn
from seamless_verl.trajectory.routes import Routes


@dataclass(eq=False)
class Tree:
    """The root node, and the turns by id in the order of their insertion."""

    root: Node = field(default_factory=lambda: Node(array(TOKEN), None))
    turns: dict[str, PlacedTurn] = field(default_factory=dict)
    image_keys: ImageKeys = field(default_factory=ImageKeys)

    def insert(self, turn: Turn) -> PlacedTurn:
        """Adds a turn that is not yet in the tree. The cost is that of comparing its prompt and of its new tokens."""
        prompt = self.image_keys.keyed(turn.prompt_ids, turn.images)
        node, within, depth = self.match(prompt)
        match_end = node if within == len(node) else _split(node, within)
        prompt_end = match_end.add(prompt[depth:]) if depth < len(prompt) else match_end
        if turn.prompt_routes is not None:
            _place_routes(prompt_end, len(prompt), turn.prompt_routes)
        end = prompt_end
        for segment in turn.segments:
            if len(segment):
                end = end.add(segment.ids, segment, turn.turn_id)
        request = self._share_request(turn.request, match_end)
        placed = PlacedTurn(
            turn.turn_id,
            len(self.turns),
            match_end,
            prompt_end,
            end,
            turn.generated,
            turn.finish,
            request,
            turn.reply,
            self.image_keys,
        )
        self.turns[turn.turn_id] = placed
        return placed

    def match(self, prompt: array[int]) -> tuple[Node, int, int]:
        """The longest match of the prompt from the root: (node, tokens matched within it, tokens matched in total).

        The prompt's ids are keyed. Of several equally long matches, the most recently generated.
        """
        data, size = prompt.tobytes(), len(prompt)
        best, longest = (self.root, 0, 0), 0
        stack = [(self.root, 0)]
        while stack and longest < size:
            node, depth = stack.pop()
            within = _count_common(node.ids, prompt, depth)
            depth += within
            if within == len(node):
                node, depth = _follow_only_children(node, depth, data)
                within = len(node)
                if depth < size:
                    stack.extend((child, depth) for child in _children_beginning_with(node, prompt[depth]))
            if depth > longest:
                best, longest = (node, within, depth), depth
        return best

    def routes_needed_from(self, prompt: array[int], images: tuple[PromptImage, ...] = ()) -> int:
        """The first of the prompt's tokens but the very first whose route is not on record; its length if all are."""
        node, _, matched = self.match(self.image_keys.keyed(prompt, images))
        known = 0
        for step in node.path_from(None):
            if step.rows() is None and len(step):
                break
            known += len(step)
        return max(1, min(known, matched))

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents before children, children in order."""
        stack = self.root.children[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    @property
    def generated(self) -> int:
        """The number of generated tokens, summed over turns."""
        return sum(turn.generated for turn in self.turns.values())

    def check_integrity(self) -> None:
        """Raises IntegrityError if the turns and the nodes disagree about the generated tokens."""
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

    def _share_request(self, request: dict[str, Any], match_end: Node) -> dict[str, Any]:
        """The request, with an earlier turn's own objects where they are equal, so that text is held once."""
        earlier = self.turns.get(match_end.turn_id) or next(reversed(self.turns.values()), None)
        return _share_equal_values(request, earlier.request) if earlier else request


@dataclass(eq=False, slots=True)
class PlacedTurn:
    """A turn in its tree. `match_end` is the node at whose end its prompt's match with earlier turns ended."""

    turn_id: str
    order: int
    match_end: Node
    prompt_end: Node
    end: Node
    generated: int
    finish: Finish
    request: dict[str, Any]
    reply: dict[str, Any]
    image_keys: ImageKeys = field(default_factory=ImageKeys)  # the tree's

    def prompt_ids(self) -> array[int]:
        return self.image_keys.restored(concat_ids(self.prompt_end.path_from(None)))

    def generated_nodes(self) -> list[Node]:
        return self.end.path_from(self.prompt_end)

    def generated_ids(self) -> array[int]:
        return concat_ids(self.generated_nodes())


class Node:
    """A run of tokens: context, or a part or all of one segment of one turn; `routes` are those of context."""

    __slots__ = ("children", "ids", "parent", "routes", "segment", "turn_id")

    def __init__(self, ids: array[int], parent: Node | None, segment: Segment | None = None, turn_id: str = "") -> None:
        self.ids, self.parent, self.segment, self.turn_id = ids, parent, segment, turn_id
        self.children: list[Node] = []
        self.routes: Routes | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __bool__(self) -> bool:
        return True

    def rows(self) -> Routes | None:
        """The route of each of its tokens, if they are on record; zeros for the very first of a sequence."""
        return self.routes if self.segment is None else self.segment.routes

    def add(self, ids: array[int], segment: Segment | None = None, turn_id: str = "") -> Node:
        """Appends a child and returns it."""
        child = Node(ids, self, segment, turn_id)
        self.children.append(child)
        return child

    def path_from(self, ancestor: Node | None) -> list[Node]:
        """The nodes below `ancestor` down to this one, inclusive. None means the whole path, with the root.

        Raises:
            LookupError: `ancestor` is not above this node.
        """
        path: list[Node] = []
        node: Node | None = self
        while node is not ancestor:
            if node is None:
                raise LookupError("the node is not below the other")
            path.append(node)
            node = node.parent
        return path[::-1]


def concat_ids(nodes: list[Node]) -> array[int]:
    """The token ids of the nodes, keyed, one node after another."""
    ids = array(TOKEN)
    for node in nodes:
        ids.extend(node.ids)
    return ids


def _children_beginning_with(node: Node, token: int) -> list[Node]:
    """The children that begin with the token, the latest last. A context child, if any, is the first.

    A prompt that begins like a generated child is matched to that child, so no context child with this token follows.
    """
    return [child for child in node.children if child.ids[0] == token]


def _follow_only_children(node: Node, depth: int, prompt: bytes) -> tuple[Node, int]:
    """Descends from a node that ends at `depth` while it has one child only and the prompt contains all of it."""
    width = node.ids.itemsize
    while len(node.children) == 1:
        # compared as bytes: most nodes of a replayed conversation match completely, and this is the cheapest test
        ids = node.children[0].ids
        if not prompt.startswith(ids, width * depth):
            break
        node, depth = node.children[0], depth + len(ids)
    return node, depth


def _count_common(ids: array[int], prompt: array[int], start: int) -> int:
    """The number of leading `ids` that equal the prompt's tokens from `start` on."""
    size = min(len(ids), len(prompt) - start)
    differs = np.asarray(ids)[:size] != np.asarray(prompt)[start : start + size]
    return int(differs.argmax()) if differs.any() else size


def _split(lower: Node, at: int) -> Node:
    """Inserts a node for the first `at` tokens above this one, which keeps the rest; returns the upper node."""
    parent, segment = lower.parent, lower.segment
    assert parent is not None and 0 < at < len(lower)
    first, rest = (None, None) if segment is None else (segment.part(0, at), segment.part(at, len(segment)))
    upper = Node(lower.ids[:at] if first is None else first.ids, parent, first, lower.turn_id)
    if lower.routes is not None:
        upper.routes, lower.routes = lower.routes.part(0, at), lower.routes.part(at)
    lower.ids, lower.segment = lower.ids[at:] if rest is None else rest.ids, rest
    parent.children[parent.children.index(lower)] = upper
    upper.children.append(lower)
    lower.parent = upper
    return upper


def _place_routes(node: Node | None, length: int, routes: Routes) -> None:
    """Gives the last tokens of a path of so many their routes, where they have none and these are whole."""
    end, first = length, length - len(routes)
    while node is not None and len(node) and (end > first or end == 1):
        begin = end - len(node)
        missing = 1 if begin == 0 else 0  # the very first token has no route
        if node.segment is None and node.routes is None and begin + missing >= first:
            node.routes = routes.part(begin + missing - first, end - first).after_zeros(missing)
        node, end = node.parent, begin


def _share_equal_values(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    shared = {key: old[key] if key in old and old[key] == value else value for key, value in new.items()}
    messages, earlier = new.get("messages"), old.get("messages")
    if isinstance(messages, list) and isinstance(earlier, list):
        pairs = zip(messages, earlier, strict=False)
        shared["messages"] = [b if a == b else a for a, b in pairs] + messages[len(earlier) :]
    return shared
