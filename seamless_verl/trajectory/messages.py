"""Chat messages reduced to what can be compared: role, text and tool calls.

Tool arguments are compared as JSON values. Numbers are compared as JavaScript knows them: clients in it write 5000.0 as
5000, and 12345678901234567890 as 12345678901234567000.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seamless_verl.trajectory.images import DIGEST

ASSISTANT = "assistant"
MAX_EXACT = 2**53  # of the integers that a float holds exactly


@dataclass(frozen=True)
class ToolCall:
    """A tool call. `arguments` is the JSON text as written; `canonical` is the same value in one fixed notation."""

    name: str
    arguments: str
    canonical: str


@dataclass(frozen=True)
class Message:
    """A message with its tool calls in order. Ids, reasoning and other fields are left out."""

    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()

    def same(self, other: Message) -> bool:
        """Whether both are equal, whatever the notation of tool arguments."""
        return self._content() == other._content()

    def _content(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self.role, self.text, [(call.name, call.canonical) for call in self.calls]


def conversation(request: Mapping[str, Any]) -> list[Message] | None:
    """The request's messages; None if it has none, as a plain completion."""
    messages = request.get("messages")
    return None if messages is None else [parse_message(entry) for entry in messages]


def parse_message(entry: Mapping[str, Any]) -> Message:
    """A message of the OpenAI form."""
    calls = tuple(_parse_call(call) for call in entry.get("tool_calls") or ())
    return Message(str(entry.get("role", "")), _text(entry.get("content")), calls)


def reply_message(reply: Mapping[str, Any]) -> Message:
    """A turn's reply as the message that an agent would send back.

    `reply` is the message itself, or has it under `message`.
    """
    return parse_message({"role": ASSISTANT, **(reply.get("message") or reply)})


def count_common(first: Sequence[Message], second: Sequence[Message]) -> int:
    """The number of leading messages that are the same in both."""
    differing = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if not a.same(b))
    return next(differing, min(len(first), len(second)))


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(map(_text_of_part, content))
    return str(content)


def _text_of_part(part: object) -> str:
    """An image on record is the same as another if its file is."""
    if not isinstance(part, Mapping):
        return str(part)
    return f"[image {part[DIGEST]}]" if DIGEST in part else str(part.get("text", ""))


def _parse_call(entry: Mapping[str, Any]) -> ToolCall:
    function = entry.get("function", entry)
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(str(function.get("name", "")), text, _canonical(text))


def _canonical(arguments: str) -> str:
    """The JSON value in one notation, which it keeps when a client in JavaScript reads and writes it."""
    try:
        value = json.loads(arguments, parse_int=_whole_number, parse_float=_number)
    except ValueError:  # a model may write arguments that are not JSON; then their text is compared
        return arguments
    return json.dumps(value, sort_keys=True)


def _whole_number(text: str) -> int:
    """The integer that JavaScript reads, which has no others than floats beyond 2^53; -0 is 0."""
    value = int(text)
    if abs(value) <= MAX_EXACT or math.isinf(rounded := float(text)):
        return value
    return int(rounded)


def _number(text: str) -> float | int:
    """An integer where the float is whole, as JavaScript writes it: 5.0 is 5."""
    value = float(text)
    return int(value) if value.is_integer() else value
