"""Stored responses of a session from its journal, after a restart: what continues them, and the items of their output.

Items have the ids that the agent got. Not restored: ids of tool calls in the latest output, usage, and that a response
was deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
)
from openai.types.responses.response_reasoning_item import Content

from seamless_verl.gateway.stored_responses import ItemIds, StoredResponse
from seamless_verl.trajectory.messages import ASSISTANT, parse_message
from seamless_verl.trajectory.records import Finish

KEY = "response"
"""The key of a stored call's own fields under which its response is named."""


def restore_response(
    response: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    reply: Mapping[str, Any],
    finish: Finish,
    created_at: float,
) -> StoredResponse:
    """The response of one call; `response` has its `id`, and whether `messages` begin with `instructions`."""
    asked = messages[1:] if response["instructions"] else messages
    output, ids = list(_items([reply])), ItemIds(response["id"])
    for item in output:
        ids.assign(item)
    items = [*(item for message in asked for item in _items([message])), *output]
    body = {
        "id": response["id"],
        "object": "response",
        "created_at": int(created_at),
        "status": "incomplete" if finish is Finish.LENGTH else "completed",
        "model": response["model"],
        "output": [item.model_dump(mode="json", by_alias=True) for item in output],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    return StoredResponse(body, items)


def _items(messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Chat messages as input items of the Responses API, in the forms that vLLM converts back; they have no ids yet."""
    for message in messages:
        if message["role"] == ASSISTANT:
            yield from _assistant_items(message)
        elif message["role"] == "tool":
            output = {"call_id": message.get("tool_call_id", ""), "output": message.get("content")}
            yield {"type": "function_call_output", **output}
        else:
            yield {"role": message["role"], "content": message.get("content") or ""}


def _assistant_items(message: Mapping[str, Any]) -> Iterator[Any]:
    if reasoning := message.get("reasoning"):
        thoughts = [Content(type="reasoning_text", text=reasoning)]
        yield ResponseReasoningItem(type="reasoning", id="", summary=[], content=thoughts)
    if text := parse_message(message).text:
        parts = [ResponseOutputText(type="output_text", text=text, annotations=[])]
        yield ResponseOutputMessage(type="message", id="", role=ASSISTANT, status="completed", content=parts)
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        yield ResponseFunctionToolCall(
            type="function_call",
            call_id=call.get("id") or f"call_{number}",
            name=function["name"],
            arguments=function["arguments"],
            status="completed",
        )
