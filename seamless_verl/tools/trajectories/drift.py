"""Detects drift: turns that continue a recorded conversation with other tokens than the recorded ones.

A turn drifts if it continues a recorded conversation, but its prompt differs from the recorded tokens before the end
of some generated run. What the model generated from that point on is then no longer context of the turn. The lost
tokens are still trained, once, on the path on which they were recorded. The cost is that one long sequence became
two shorter ones, and their common part is read twice.

A turn continues a recorded conversation if
- its tokens follow the record up to a generated run, or into it, and then differ; or
- its messages repeat the recorded ones including a reply whose tokens the turn does not repeat; or
- its messages repeat a whole recorded request and continue with something else than the reply; or
- a recorded reply is at its place among the messages, but an earlier message was changed; or
- it has fewer messages than the record, at least the first in common, and contains a later recorded reply, as such or
  quoted in a message of another role (a summary that the model wrote).

These are therefore not drift: the same prompt sampled again, a return to an earlier point, another tool result or
question at the same point, another agent or sub-agent that shares only the template or the system prompt.
A summary that no recorded turn wrote, in place of the first user message, counts as a new conversation.

`_find_cause` decides the cause. Without `decode` and without messages it has too little to compare, and the cause is
`agent_edit`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from seamless_verl.trajectory.messages import ASSISTANT, Message, conversation, count_common, reply_message
from seamless_verl.trajectory.tree import Node, PlacedTurn, Tree, concat_ids

Decode = Callable[[Sequence[int]], str]
SNIPPET_TOKENS = 16  # reported of either side
LEAD_TOKENS = 8  # decoded before the fork, so that a character that the fork divides is complete
RECENT_TURNS = 16  # turns below a fork among which the continued one is searched
MIN_QUOTE_CHARS = 32  # a shorter reply can appear in another message by chance


class Cause(StrEnum):
    """Why the replayed tokens differ."""

    TEMPLATE = "template"
    """the same messages, rendered differently: a separator, dropped reasoning, another generation prompt"""
    RETOKENIZATION = "retokenization"  # the same text, split into other tokens
    COMPACTION = "compaction"  # the agent shortened the conversation or replaced it with a summary
    AGENT_EDIT = "agent_edit"  # the agent changed, removed or added a message
    TOOL_CALL_RESERIALIZATION = "tool_call_reserialization"
    """the agent wrote the same tool arguments as other JSON text"""


@dataclass(frozen=True)
class Drift:
    """Where a turn differs from the record, and what that costs.

    `at_token`: index in the prompt of the first differing token. `recorded_turn_id`: the turn that it continues.
    `lost_tokens`: generated on the recorded path from there on; the turn no longer has them as context.
    `kept_tokens`: generated before it, still context. The ids are the first few on either side.
    """

    turn_id: str
    recorded_turn_id: str
    at_token: int
    cause: Cause
    recorded_ids: tuple[int, ...]
    replayed_ids: tuple[int, ...]
    lost_tokens: int
    kept_tokens: int


def find_drifts(tree: Tree, *, decode: Decode | None = None) -> list[Drift]:
    """The drift of each turn that has any, in the order of turns, compared with the turns inserted before it.

    `decode` turns ids into text; with it, a cause that depends on text is certain. Later turns change no earlier
    turn's drift: turns refer to ends of nodes, which insertions may split but never move.
    """
    turns = list(tree.turns.values())
    drifts = (_fork_drift(_find_fork(tree, turns, turn), decode) for turn in turns)
    return [drift for drift in drifts if drift is not None]


@dataclass(frozen=True)
class _Fork:
    """A turn, the recorded turn that it may continue, and both paths below the node where they separate.

    `lost_turns`: those with generated tokens on the recorded path.
    """

    turn: PlacedTurn
    recorded_turn: PlacedTurn
    shared_nodes: list[Node]
    recorded_nodes: list[Node]
    replayed_ids: array[int]
    lost_turns: list[PlacedTurn]


def _find_fork(tree: Tree, turns: Sequence[PlacedTurn], turn: PlacedTurn) -> _Fork | None:
    fork_node = turn.match_end
    if turn.prompt_end is fork_node or len(fork_node.children) < 2:
        return None  # the prompt has no new tokens, or no other turn continues from this node
    recorded_turn = _find_recorded_turn(turns, turn)
    if recorded_turn is None:
        return None
    recorded_nodes = recorded_turn.end.path_from(fork_node)
    lost_ids = dict.fromkeys(node.turn_id for node in recorded_nodes if node.turn_id)
    return _Fork(
        turn,
        recorded_turn,
        fork_node.path_from(None),
        recorded_nodes,
        tree.image_keys.restored(concat_ids(turn.prompt_end.path_from(fork_node))),
        [tree.turns[turn_id] for turn_id in lost_ids],
    )


def _find_recorded_turn(turns: Sequence[PlacedTurn], turn: PlacedTurn) -> PlacedTurn | None:
    """Of the latest earlier turns with generated tokens below the fork, the one with the most messages in common."""
    earlier = (turns[order] for order in range(turn.order - 1, -1, -1))
    below = islice((other for other in earlier if _has_generated_below(other, turn.match_end)), RECENT_TURNS)
    messages = conversation(turn.request) or []
    return max(below, key=lambda other: count_common(messages, _conversation_with_reply(other) or []), default=None)


def _has_generated_below(turn: PlacedTurn, fork_node: Node) -> bool:
    generated = False
    node: Node | None = turn.end
    while node is not None and node is not fork_node:
        generated |= node.segment is not None
        node = node.parent
    return node is fork_node and generated


def _conversation_with_reply(turn: PlacedTurn) -> list[Message] | None:
    messages = conversation(turn.request)
    return None if messages is None else [*messages, reply_message(turn.reply)]


def _fork_drift(fork: _Fork | None, decode: Decode | None) -> Drift | None:
    """None if the turn extends the record or is a branch of its own."""
    if fork is None:
        return None
    diff = _diff_fork(fork)
    if diff is None and fork.recorded_nodes[0].segment is None:
        return None
    restored = fork.turn.image_keys.restored
    return Drift(
        fork.turn.turn_id,
        fork.recorded_turn.turn_id,
        sum(len(node) for node in fork.shared_nodes),
        _find_cause(fork, diff, decode),
        tuple(restored(concat_ids(fork.recorded_nodes)[:SNIPPET_TOKENS])),
        tuple(fork.replayed_ids[:SNIPPET_TOKENS]),
        sum(len(node) for node in fork.recorded_nodes if node.segment is not None),
        sum(len(node) for node in fork.shared_nodes if node.segment is not None),
    )


def _find_cause(fork: _Fork, diff: MessageDiff | None, decode: Decode | None) -> Cause:
    if decode is not None and _has_same_text(fork, decode):
        return Cause.RETOKENIZATION
    if diff is None:
        return Cause.AGENT_EDIT
    first_recorded = fork.recorded_nodes[0].turn_id
    within_generated = fork.shared_nodes and fork.shared_nodes[-1].turn_id == first_recorded != ""
    if decode is None and diff.replies_repeated and within_generated:
        return Cause.RETOKENIZATION  # the template's own tokens are outside generated runs
    return diff.cause


def _has_same_text(fork: _Fork, decode: Decode) -> bool:
    """Whether the replayed text begins with the recorded text up to the end of the first lost run."""
    first = next(i for i, node in enumerate(fork.recorded_nodes) if node.segment is not None)
    turn_id = fork.recorded_nodes[first].turn_id
    run = [node for i, node in enumerate(fork.recorded_nodes) if i <= first or node.turn_id == turn_id]
    restored = fork.turn.image_keys.restored
    lead, recorded = restored(concat_ids(fork.shared_nodes)[-LEAD_TOKENS:]), restored(concat_ids(run))
    recorded_text = decode(lead + recorded).rstrip("\ufffd")
    replayed_text = decode(lead + fork.replayed_ids[: 2 * len(recorded) + SNIPPET_TOKENS])
    return len(recorded_text) > len(decode(lead)) and replayed_text.startswith(recorded_text)


@dataclass(frozen=True)
class MessageDiff:
    """The cause according to the messages alone.

    `replies_repeated`: the messages repeat the recorded replies, except that tool arguments may be other JSON text.
    """

    cause: Cause
    replies_repeated: bool = False


def _diff_fork(fork: _Fork) -> MessageDiff | None:
    messages, recorded = conversation(fork.turn.request), _conversation_with_reply(fork.recorded_turn)
    if messages is None or recorded is None:
        return None
    requests = ((turn, conversation(turn.request)) for turn in fork.lost_turns)
    replies = {len(request): reply_message(turn.reply) for turn, request in requests if request is not None}
    return diff_messages(messages, recorded, replies)


def diff_messages(
    messages: Sequence[Message], recorded: Sequence[Message], replies: Mapping[int, Message]
) -> MessageDiff | None:
    """Compares a request's messages with a recorded conversation that ends in its last reply.

    `replies`: the messages of the record that the model wrote and that the fork loses, by index.
    None if the messages do not continue the recorded conversation.
    """
    common = count_common(messages, recorded)
    if any(index < common for index in replies):
        rewritten = list(messages[:common]) != list(recorded[:common])
        return MessageDiff(Cause.TOOL_CALL_RESERIALIZATION if rewritten else Cause.TEMPLATE, replies_repeated=True)
    if common == len(messages):
        return None
    shorter = len(messages) < len(recorded)
    in_place = any(index < len(messages) and messages[index].same(reply) for index, reply in replies.items())
    moved = shorter and common > 0 and _contains_reply(messages[common:], list(replies.values()))
    if common in replies or in_place or moved:
        return MessageDiff(Cause.COMPACTION if shorter else Cause.AGENT_EDIT)
    return None


def _contains_reply(messages: Sequence[Message], replies: Sequence[Message]) -> bool:
    """Whether one of the replies is among the messages, or quoted in one of another role."""
    return any(
        message.same(reply)
        if message.role == ASSISTANT
        else len(reply.text) >= MIN_QUOTE_CHARS and reply.text in message.text
        for message in messages
        for reply in replies
    )
