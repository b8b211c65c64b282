"""How a list of messages departs from a recorded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from seamless_verl.trajectory.messages import ASSISTANT, Message, leading

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
