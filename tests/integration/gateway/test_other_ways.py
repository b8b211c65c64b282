"""Conversations that agents send back in other ways than they got them: the session keeps its recorded ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.gateway import TOOL, TOOL_CALL, GatewayHarness, gateway_harness, user

pytestmark = pytest.mark.integration
OTHER_CALL = '<tool_call>{"name": "add", "arguments": {"a": 4, "b": 5}}</tool_call>'
FUNCTION: Any = TOOL["function"]


def recorded(harness: GatewayHarness, number: int = 0) -> list[int]:
    """The ids of a call's prompt and of its reply."""
    call = harness.source.calls[number]
    return [*call.prompt_ids, *harness.recorder.ids(call.call_id)]


def check_continued(harness: GatewayHarness, new: str) -> None:
    """The last prompt is the first turn's ids verbatim, and then `new`."""
    before, prompt = recorded(harness), list(harness.source.calls[-1].prompt_ids)
    assert prompt[: len(before)] == before
    assert harness.tokenizer.decode(prompt[len(before) :]) == new


RESULTS = (
    "<|im_start|><|tool|><tool_response>5</tool_response><|im_end|>"
    "<|im_start|><|tool|><tool_response>9</tool_response><|im_end|><|im_start|><|assistant|>"
)


async def send_chat(harness: GatewayHarness, order: tuple[int, int]) -> None:
    asked: dict[str, Any] = {"model": "nano", "tools": [TOOL]}
    reply = (await harness.openai.chat.completions.create(messages=[user("add")], **asked)).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": text}
        for call, text in zip(reply.tool_calls, ("5", "9"), strict=True)
    ]
    back = [user("add"), reply.model_dump(exclude_none=True), *(results[place] for place in order)]
    await harness.openai.chat.completions.create(messages=back, **asked)


async def send_response(harness: GatewayHarness, order: tuple[int, int]) -> None:
    asked: dict[str, Any] = {"model": "nano", "tools": [{"type": "function", **FUNCTION}]}
    reply = await harness.openai.responses.create(input=[user("add")], **asked)
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": text}
        for call, text in zip(reply.output, ("5", "9"), strict=True)
    ]
    back: Any = [user("add"), *(item.model_dump() for item in reply.output), *(results[place] for place in order)]
    await harness.openai.responses.create(input=back, **asked)


async def send_message(harness: GatewayHarness, order: tuple[int, int]) -> None:
    tool = {"name": "add", "description": "adds", "input_schema": FUNCTION["parameters"]}
    asked: dict[str, Any] = {"model": "nano", "max_tokens": 100, "tools": [tool]}
    reply = await harness.anthropic.messages.create(messages=[user("add")], **asked)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": text}
        for block, text in zip(reply.content, ("5", "9"), strict=True)
    ]
    said = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]}
    back: Any = [user("add"), said, {"role": "user", "content": [results[place] for place in order]}]
    await harness.anthropic.messages.create(messages=back, **asked)


@pytest.mark.parametrize("send", [send_chat, send_response, send_message])
async def test_results_are_shown_in_the_order_of_their_calls(nano: Path, send: Any) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies(f"{TOOL_CALL}\n{OTHER_CALL}", "done")
        await send(harness, (1, 0))
        check_continued(harness, RESULTS)
        stored = harness.source.calls[-1].request["messages"]
        assert [one["content"] for one in stored if one["role"] == "tool"] == ["5", "9"]
        swapped = list(harness.source.calls[-1].prompt_ids)
        harness.source.calls.clear()
        harness.set_replies(f"{TOOL_CALL}\n{OTHER_CALL}", "done")
        await send(harness, (0, 1))
        assert list(harness.source.calls[-1].prompt_ids) == swapped


async def test_numbers_that_javascript_wrote_again_continue_the_record(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies(TOOL_CALL.replace("2", "5000.0").replace("3", "12345678901234567890"), "done")
        tool = {"name": "add", "description": "adds", "input_schema": FUNCTION["parameters"]}
        asked: dict[str, Any] = {"model": "nano", "max_tokens": 200, "tools": [tool]}
        reply = await harness.anthropic.messages.create(messages=[user("add")], **asked)
        (block,) = reply.content
        assert block.type == "tool_use"
        written = {"type": "tool_use", "id": block.id, "name": "add", "input": {"a": 5000, "b": 12345678901234567000}}
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "9"}
        back: Any = [user("add"), {"role": "assistant", "content": [written]}, {"role": "user", "content": [result]}]
        await harness.anthropic.messages.create(messages=back, **asked)
        check_continued(harness, RESULTS[RESULTS.index("<|im_end|>") + len("<|im_end|>") :])
