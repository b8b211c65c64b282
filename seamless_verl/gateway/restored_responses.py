"""Stored responses of a session from its journal, after a restart: what continues them, and their text and calls.

Not restored: ids of items and of tool calls, reasoning, usage, and that a response was deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai.types.responses import ResponseFunctionToolCall

from seamless_verl.gateway.stored_responses import StoredResponse
from seamless_verl.trajectory.messages import ASSISTANT
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
    output = list(_items([reply]))
    items = [*(item for message in asked for item in _items([message])), *output]
    body = {
        "id": response["id"],
        "object": "response",
        "created_at": int(created_at),
        "status": "incomplete" if finish is Finish.LENGTH else "completed",
        "model": response["model"],
        "output": [_output_item(item, response["id"], number) for number, item in enumerate(output)],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    return StoredResponse(body, items)


def _items(messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Chat messages as input items of the Responses API, in the forms that vLLM converts back."""
    for message in messages:
        if message["role"] == "tool":
            output = {"call_id": message.get("tool_call_id", ""), "output": message.get("content")}
            yield {"type": "function_call_output", **output}
            continue
        if message.get("content") or message["role"] != ASSISTANT:
            yield {"role": message["role"], "content": message.get("content") or ""}
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            yield ResponseFunctionToolCall(
                type="function_call",
                call_id=call.get("id") or f"call_{number}",
                name=function["name"],
                arguments=function["arguments"],
            )


def _output_item(item: Any, response_id: str, number: int) -> dict[str, Any]:
    identity = f"{response_id}_{number}"
    if isinstance(item, ResponseFunctionToolCall):
        return {**item.model_dump(mode="json"), "id": f"fc_{identity}", "status": "completed"}
    text = {"type": "output_text", "text": item["content"], "annotations": []}
    return {"type": "message", "id": f"msg_{identity}", "role": ASSISTANT, "status": "completed", "content": [text]}
