"""How a list of messages departs from a recorded one.

Why an agent's replay of a conversation is not the conversation on record.

A turn drifts when it carries a recorded conversation on, but its prompt is not that conversation's
tokens: it departs before the end of some generated run, so what the model generated from there on
is no longer context to it. The lost tokens are still trained, once, on the path they were recorded on;
what is lost is that one long sequence became two shorter ones, with the common part read twice.

A turn carries a recorded conversation on when
- its tokens follow the record into a generated run, or up to one, and then go on otherwise; or
- its messages repeat the record's up to and with a reply whose tokens it does not repeat; or
- its messages repeat a recorded request whole, and go on with something else than the reply; or
- a recorded reply is among its messages where it was, though an earlier message was changed; or
- it has fewer messages than the record, and keeps a later recorded reply, or quotes one in a message of another
  role (a summary the model wrote) after at least one common message.

So these are not drift: the same prompt sampled again, a return to an earlier point, another tool result or
question at the same point, another agent or sub-agent of which only the template or the system prompt is common.
A summary that no recorded turn wrote, in place of the first user message, reads as a new conversation.

The cause is judged from plain facts, in the order of `_cause`; without `decode` and without messages there is
little to judge by, and the cause is `agent_edit`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from seamless_verl.trajectory.messages import ASSISTANT, Message, answer, conversation, leading
from seamless_verl.trajectory.tree import Node, PlacedTurn, Tree, spelled

QUOTE = 32  # characters: a shorter reply can stand in another message by chance


class Cause(StrEnum):
    """What made the replayed tokens differ."""

    TEMPLATE = "template"
    """the same messages, rendered otherwise: a separator, dropped reasoning, another generation prompt"""
    RETOKENIZATION = "retokenization"
    """the same text, cut into other tokens"""
    COMPACTION = "compaction"
    """the agent shortened the conversation or put a summary in its place"""
    AGENT_EDIT = "agent_edit"
    """the agent changed, left out or added a message"""
    TOOL_CALL_RESERIALIZATION = "tool_call_reserialization"
    """the agent wrote the same tool arguments as other JSON text"""


@dataclass(frozen=True)
class Judged:
    """The cause the messages speak for; `replayed`: they repeat the replies, at most with other JSON text."""

    cause: Cause
    replayed: bool = False


def judge(now: Sequence[Message], then: Sequence[Message], replies: Mapping[int, Message]) -> Judged | None:
    """Compares a request's messages with a recorded conversation, its last reply included.

    `replies`: those of the conversation's messages that the fork cuts off and the model wrote, by
    index. None where `now` does not carry the conversation on.
    """
    common = leading(now, then)
    if any(index < common for index in replies):
        rewritten = list(now[:common]) != list(then[:common])
        return Judged(Cause.TOOL_CALL_RESERIALIZATION if rewritten else Cause.TEMPLATE, replayed=True)
    if common == len(now):
        return None
    shrank = len(now) < len(then)
    kept = any(index < len(now) and now[index].same(reply) for index, reply in replies.items())
    moved = shrank and common > 0 and _moved(now[common:], list(replies.values()))
    if common in replies or kept or moved:
        return Judged(Cause.COMPACTION if shrank else Cause.AGENT_EDIT)
    return None


def _moved(messages: Sequence[Message], replies: Sequence[Message]) -> bool:
    """Whether a reply stands among the messages, as itself or quoted in one of another role."""
    return any(
        message.same(reply) if message.role == ASSISTANT else len(reply.text) >= QUOTE and reply.text in message.text
        for message in messages
        for reply in replies
    )


Decode = Callable[[Sequence[int]], str]
SNIPPET = 16  # tokens shown of either side
LEAD = 8  # tokens decoded before the fork, so that a character cut in two by it is whole
RECENT = 16  # turns below a fork among which the one that was carried on is looked for


@dataclass(frozen=True)
class Drift:
    """Where a turn departed from the record, and what it cost.

    `at_token`: index in the prompt of the first differing token. `departed`: the turn whose path was left.
    `lost_tokens`: generated on that path from there on, which the turn no longer has as context.
    `kept_tokens`: generated before it, still shared. The ids are the first few on either side.
    """

    turn_id: str
    departed: str
    at_token: int
    cause: Cause
    recorded_ids: tuple[int, ...]
    replayed_ids: tuple[int, ...]
    lost_tokens: int
    kept_tokens: int


@dataclass(frozen=True)
class _Fork:
    """A turn, the one it departed from, and the two ways down from the node where they parted."""

    turn: PlacedTurn
    departed: PlacedTurn
    shared: list[Node]
    recorded: list[Node]
    replayed: array[int]
    lost: list[PlacedTurn]

    @property
    def lost_tokens(self) -> int:
        return sum(len(node) for node in self.recorded if node.segment is not None)


def drifts_of(tree: Tree, *, decode: Decode | None = None) -> list[Drift]:
    """The drift of each turn that has any, in the order of turns, against the turns inserted before it.

    `decode`, if given, makes causes certain where text decides. What comes later changes no turn's drift: turns refer
    to ends of nodes, which later insertions may split but never move.
    """
    turns = list(tree.turns.values())
    explained = (_explained(_fork(tree, turns, turn), decode) for turn in turns)
    return [drift for drift in explained if drift is not None]


def _explained(fork: _Fork | None, decode: Decode | None) -> Drift | None:
    """None where the turn extends or branches."""
    if fork is None:
        return None
    judged = _judged(fork)
    if judged is None and fork.recorded[0].segment is None:
        return None
    recorded = spelled(fork.recorded)
    return Drift(
        fork.turn.turn_id,
        fork.departed.turn_id,
        sum(len(node) for node in fork.shared),
        _cause(fork, judged, decode),
        tuple(recorded[:SNIPPET]),
        tuple(fork.replayed[:SNIPPET]),
        fork.lost_tokens,
        sum(len(node) for node in fork.shared if node.segment is not None),
    )


def _fork(tree: Tree, turns: Sequence[PlacedTurn], turn: PlacedTurn) -> _Fork | None:
    if turn.prompt_end is turn.joined or len(turn.joined.children) < 2:
        return None  # nothing new was read, or nobody else went on from there
    replayed = spelled(turn.prompt_end.up_to(turn.joined))
    departed = _departed(turns, turn)
    if departed is None:
        return None
    recorded = departed.end.up_to(turn.joined)
    lost = [tree.turns[turn_id] for turn_id in dict.fromkeys(node.turn_id for node in recorded if node.turn_id)]
    return _Fork(turn, departed, turn.joined.up_to(None), recorded, replayed, lost)


def _departed(turns: Sequence[PlacedTurn], turn: PlacedTurn) -> PlacedTurn | None:
    """Of the latest earlier turns with generated tokens below the fork, the one with the most messages in common."""
    earlier = (turns[order] for order in range(turn.order - 1, -1, -1))
    below = islice((other for other in earlier if _loses(other, turn.joined)), RECENT)
    now = conversation(turn.request) or []
    return max(below, key=lambda other: leading(now, _history(other) or []), default=None)


def _loses(other: PlacedTurn, fork: Node) -> bool:
    generated = False
    node: Node | None = other.end
    while node is not None and node is not fork:
        generated |= node.segment is not None
        node = node.parent
    return node is fork and generated


def _history(turn: PlacedTurn) -> list[Message] | None:
    """A turn's messages with its reply at their end."""
    messages = conversation(turn.request)
    return None if messages is None else [*messages, answer(turn.reply)]


def _cause(fork: _Fork, judged: Judged | None, decode: Decode | None) -> Cause:
    if decode is not None and _same_text(fork, decode):
        return Cause.RETOKENIZATION
    if judged is None:
        return Cause.AGENT_EDIT
    inside = fork.shared and fork.shared[-1].turn_id == fork.recorded[0].turn_id != ""
    if decode is None and judged.replayed and inside:
        return Cause.RETOKENIZATION  # the template's own tokens lie outside generated runs
    return judged.cause


def _same_text(fork: _Fork, decode: Decode) -> bool:
    """Whether the replay's text begins with that of the record up to the end of the first lost run."""
    first = next(i for i, node in enumerate(fork.recorded) if node.segment is not None)
    turn_id = fork.recorded[first].turn_id
    run = [node for i, node in enumerate(fork.recorded) if i <= first or node.turn_id == turn_id]
    lead, recorded = spelled(fork.shared)[-LEAD:], spelled(run)
    text = decode(lead + recorded).rstrip("\ufffd")
    replay = decode(lead + fork.replayed[: 2 * len(recorded) + SNIPPET])
    return len(text) > len(decode(lead)) and replay.startswith(text)


def _judged(fork: _Fork) -> Judged | None:
    now, then = conversation(fork.turn.request), _history(fork.departed)
    if now is None or then is None:
        return None
    requests = ((turn, conversation(turn.request)) for turn in fork.lost)
    replies = {len(request): answer(turn.reply) for turn, request in requests if request is not None}
    return judge(now, then, replies)
