"""Chat messages reduced to what can be compared: role, text, tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ASSISTANT = "assistant"


@dataclass(frozen=True)
class ToolCall:
    """A tool call: `written` is its arguments as JSON text, `meant` the same in one canonical writing."""

    name: str
    written: str
    meant: str


@dataclass(frozen=True)
class Message:
    """A message; `calls` in order. Ids, reasoning and other fields are left out."""

    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()

    def same(self, other: Message) -> bool:
        """Equal but for how tool arguments are written."""
        return self._meaning() == other._meaning()

    def _meaning(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self.role, self.text, [(call.name, call.meant) for call in self.calls]


def conversation(request: Mapping[str, Any]) -> list[Message] | None:
    """The request's messages; None where it has none, as for a plain completion."""
    messages = request.get("messages")
    return None if messages is None else [message(entry) for entry in messages]


def answer(reply: Mapping[str, Any]) -> Message:
    """The reply as the message an agent would send back; accepts the message itself or one under `message`."""
    return message({"role": ASSISTANT, **(reply.get("message") or reply)})


def message(entry: Mapping[str, Any]) -> Message:
    calls = tuple(_call(call) for call in entry.get("tool_calls") or ())
    return Message(str(entry.get("role", "")), _text(entry.get("content")), calls)


def leading(now: Sequence[Message], then: Sequence[Message]) -> int:
    """How many messages agree from the start."""
    differing = (i for i, (a, b) in enumerate(zip(now, then, strict=False)) if not a.same(b))
    return next(differing, min(len(now), len(then)))


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(part.get("text", "") if isinstance(part, Mapping) else str(part) for part in content)
    return str(content)


def _call(entry: Mapping[str, Any]) -> ToolCall:
    function = entry.get("function", entry)
    arguments = function.get("arguments", "")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(str(function.get("name", "")), written, _canonical(written))


def _canonical(written: str) -> str:
    try:
        return json.dumps(json.loads(written), sort_keys=True)
    except ValueError:  # a model may write arguments that are no JSON; then they mean what they say
        return written
