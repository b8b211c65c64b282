"""A streamed reply says what a whole one says, in each API, for whatever a model writes; and so does the record."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from support.gateway import TOOL, TOOL_CALL, GatewayHarness, gateway_harness, user
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

from seamless_verl.trajectory.messages import parse_message, reply_message
from seamless_verl.trajectory.records import Finish

pytestmark = pytest.mark.integration
HI = [user("hi")]
OTHER_CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "é"}]}}</tool_call>'
MALFORMED = {
    "cut in the name": '<tool_call>{"name": "ad',
    "cut in the arguments": '<tool_call>{"name": "add", "arguments": {"a": 2, "b"',
    "cut in the end": '<tool_call>{"name": "add", "arguments": {"a": 2}</tool_ca',
    "no JSON": '<tool_call>{"name": "add", "arguments": {a: 2}}</tool_call>',
    "no arguments": '<tool_call>{"name": "add"}</tool_call>',
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "a name that is no text": '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    "arguments in a text": '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
    "arguments in a list": '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    "not a number": '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    "half a character": '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
    "one of two": TOOL_CALL + '<tool_call>{"name": "add", "arguments": {</tool_call>',
    "after a text": 'well, so <tool_call>{"name"}</tool_call>',
    "a tag alone": "<tool_call>",
    "an empty call": "<tool_call></tool_call>",
}
WELL_FORMED = {
    "nothing": "",
    "a text": "hello there",
    "blanks at both ends": " \n hello \n",
    "a call": TOOL_CALL,
    "a text and a call": "let me see.\n\n" + TOOL_CALL,
    "blanks and a call": "\n\n" + TOOL_CALL,
    "two calls": f"{TOOL_CALL}\n{OTHER_CALL}",
    "a call and a text": TOOL_CALL + " there",
    "a tool that is not offered": '<tool_call>{"name": "fly", "arguments": {"to": "the moon"}}</tool_call>',
    "a call of nothing": '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
    "the beginning of a tag": "1 <tool_ca",
}
TEXTS = WELL_FORMED | MALFORMED
REASONED = {
    f"{name} after {kind}": f"{reasoning}</think>{text}"
    for kind, reasoning in (("thoughts", "I think\nso"), ("no thoughts", ""))
    for name, text in {
        "a text": "\n\nhello",
        "a call": "\n\n" + TOOL_CALL,
        "a malformed call": "\n\n" + MALFORMED["no JSON"],
        "a cut call": MALFORMED["cut in the arguments"],
        "nothing": "",
    }.items()
} | {"thoughts alone": "I think", "a call in thoughts": "I think " + TOOL_CALL}
SIZES = (1, 4, 1000)
Said = tuple[str, str, list[tuple[str, Any]], str | None]
"""Reasoning, text, calls with their arguments, and why the reply ended."""


def arguments_of(text: str) -> Any:
    return json.loads(text)


def said_in_chat(completion: Any) -> Said:
    choice = completion.choices[0]
    message = choice.message
    calls = [(call.function.name, arguments_of(call.function.arguments)) for call in message.tool_calls or ()]
    reasoning = (message.model_extra or {}).get("reasoning")
    return reasoning or "", message.content or "", calls, choice.finish_reason


def said_in_response(items: list[Any], status: str | None) -> Said:
    reasoning = "".join(part.text for item in items if item.type == "reasoning" for part in item.content or ())
    text = "".join(part.text for item in items if item.type == "message" for part in item.content)
    calls = [(item.name, arguments_of(item.arguments)) for item in items if item.type == "function_call"]
    return reasoning, text, calls, status


def said_in_message(message: Any) -> Said:
    reasoning = "".join(block.thinking for block in message.content if block.type == "thinking")
    text = "".join(block.text for block in message.content if block.type == "text")
    calls = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
    assert message.content, "a client may look at the first block"
    return reasoning, text, calls, message.stop_reason


async def chat(harness: GatewayHarness, tools: bool, stream: bool, **asked: Any) -> Said:
    offered = {"tools": [TOOL]} if tools else {}
    asked = {"model": "nano", "messages": HI, **offered, **asked}
    if not stream:
        return said_in_chat(await harness.openai.chat.completions.create(**asked))
    state: Any = ChatCompletionStreamState()
    async for chunk in await harness.openai.chat.completions.create(**asked, stream=True):
        state.handle_chunk(chunk)
        deltas = [choice.delta for choice in chunk.choices]
        assert not any(delta.content and delta.tool_calls for delta in deltas), "a client may look for one of both"
    return said_in_chat(state.current_completion_snapshot)


async def responses(harness: GatewayHarness, tools: bool, stream: bool) -> Said:
    offered = {"tools": [{"type": "function", **TOOL["function"]}]} if tools else {}  # type: ignore[dict-item]
    asked: dict[str, Any] = {"model": "nano", "input": "hi", **offered}
    if not stream:
        reply = await harness.openai.responses.create(**asked)
        return said_in_response(reply.output, reply.status)
    events = [event async for event in await harness.openai.responses.create(**asked, stream=True)]
    items = [event.item for event in events if event.type == "response.output_item.done"]
    last = events[-1]
    assert last.type == f"response.{last.response.status}"
    assert [item.model_dump() for item in last.response.output] == [item.model_dump() for item in items]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return said_in_response(items, last.response.status)


async def messages(harness: GatewayHarness, tools: bool, stream: bool) -> Said:
    function: Any = TOOL["function"]
    tool = {"name": "add", "description": "adds", "input_schema": function["parameters"]}
    offered = {"tools": [tool]} if tools else {}
    asked: dict[str, Any] = {"model": "nano", "max_tokens": 500, "messages": HI, **offered}
    if not stream:
        return said_in_message(await harness.anthropic.messages.create(**asked))
    async with harness.anthropic.messages.stream(**asked) as events:
        return said_in_message(await events.get_final_message())


APIS = {"chat": chat, "responses": responses, "messages": messages}


def recorded(harness: GatewayHarness) -> list[tuple[str, list[Any]]]:
    """Text and calls of each reply on record."""
    replies = [reply_message(end[2]) for end in harness.recorder.ends()]
    return [(reply.text, [(call.name, json.loads(call.arguments)) for call in reply.calls]) for reply in replies]


async def compare(harness: GatewayHarness, api: str, text: str, finish: Finish, *, tools: bool = True) -> Said:
    """What is said whole and, in parts of each size, streamed; and what is on record."""
    harness.recorder.events.clear()
    options: dict[str, Any] = {"end": finish is Finish.STOP, "finish": finish}
    harness.set_replies(text, **options)
    whole = await APIS[api](harness, tools, False)
    for size in SIZES:
        harness.set_replies(text, size=size, **options)
        assert await APIS[api](harness, tools, True) == whole, (api, text, size)
    await harness.drain()
    assert recorded(harness) == [(whole[1], whole[2])] * (1 + len(SIZES))
    return whole


@pytest.mark.parametrize("api", APIS)
async def test_streamed_is_whole(nano: Path, api: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with gateway_harness(nano) as harness:
        for name, text in TEXTS.items():
            caplog.clear()
            malformed = harness.gateway.metrics()["gateway/malformed_calls"]
            whole = await compare(harness, api, text, Finish.STOP)
            lines = [record for record in caplog.records if "cannot be read" in record.getMessage()]
            assert not any(record.exc_info for record in caplog.records), name
            malformed = harness.gateway.metrics()["gateway/malformed_calls"] - malformed
            if name in MALFORMED:
                assert whole[1] == text and not whole[2], (name, whole)
                assert malformed == len(lines) == 1 + len(SIZES), name
            else:
                assert not malformed and not lines, (name, [line.getMessage() for line in lines])
                assert bool(whole[2]) == ("call" in name or "tool" in name), (name, whole)


@pytest.mark.parametrize("api", APIS)
async def test_what_was_cut_is_said_alike(nano: Path, api: str) -> None:
    ends = {"chat": "length", "responses": "incomplete", "messages": "max_tokens"}
    async with gateway_harness(nano) as harness:
        for name, text in TEXTS.items():
            if not text:
                continue
            whole = await compare(harness, api, text, Finish.LENGTH)
            if not whole[2]:
                assert whole[1] == text and whole[3] == ends[api], (name, whole)


@pytest.mark.parametrize("api", APIS)
async def test_without_tools_all_is_text(nano: Path, api: str) -> None:
    async with gateway_harness(nano) as harness:
        for text in TEXTS.values():
            whole = await compare(harness, api, text, Finish.STOP, tools=False)
            assert whole[1:3] == (text, [])


@pytest.mark.parametrize("api", APIS)
async def test_reasoning_is_said_alike(nano: Path, api: str) -> None:
    async with gateway_harness(nano, ("--reasoning-parser", "qwen3")) as harness:
        for name, text in REASONED.items():
            whole = await compare(harness, api, text, Finish.STOP)
            assert ("thoughts" in name and "no thoughts" not in name) == bool(whole[0]), (name, whole)
            assert ("malformed" in name or "cut" in name) == ("<tool_call>" in whole[1]), (name, whole)


async def test_a_forced_call_is_said_alike(nano: Path) -> None:
    arguments = {"a": 2, "b": 3}
    named = {"type": "function", "function": {"name": "add"}}
    plain = Hermes2ProToolParser.supports_required_and_named  # then a forced call is written without markup
    written: dict[str, Any] = {"required": [{"name": "add", "parameters": arguments}], "named": arguments}
    async with gateway_harness(nano) as harness:
        for kind, choice in (("required", "required"), ("named", named)):
            call = json.dumps(written[kind]) if plain else TOOL_CALL
            for text, finish in ((call, Finish.STOP), (call[:-14], Finish.LENGTH)):
                options: dict[str, Any] = {"end": finish is Finish.STOP, "finish": finish}
                harness.set_replies(text, **options)
                whole = await chat(harness, True, False, tool_choice=choice)
                for size in SIZES:
                    harness.set_replies(text, size=size, **options)
                    assert await chat(harness, True, True, tool_choice=choice) == whole
                assert whole[2] == ([("add", arguments)] if finish is Finish.STOP else [])
                assert whole[1] == ("" if finish is Finish.STOP else text)


async def test_only_one_call_where_one_was_asked_for(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies(TOOL_CALL + OTHER_CALL)
        for stream in (False, True):
            said = await chat(harness, True, stream, parallel_tool_calls=False)
            assert said[2] == [("add", {"a": 2, "b": 3})]
        assert recorded(harness) == [("", [("add", {"a": 2, "b": 3})])] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_request_continues_the_recorded_ids(nano: Path, stream: bool) -> None:
    """An agent sends back what it was shown, and the prompt begins with the ids that the model generated."""
    async with gateway_harness(nano) as harness:
        for name, text in TEXTS.items():
            harness.set_replies(text)
            asked: dict[str, Any] = {"model": "nano", "messages": [user(name)], "tools": [TOOL]}
            if stream:
                state: Any = ChatCompletionStreamState()
                async for chunk in await harness.openai.chat.completions.create(**asked, stream=True):
                    state.handle_chunk(chunk)
                reply = state.current_completion_snapshot
            else:
                reply = await harness.openai.chat.completions.create(**asked)
            call = harness.source.calls[-1]
            message = reply.choices[0].message.model_dump(exclude_none=True)
            shown = {key: value for key, value in message.items() if key in ("role", "content", "tool_calls")}
            assert parse_message(shown).same(reply_message(harness.recorder.ends()[-1][2])), name
            more = [*asked["messages"], {"content": "", **shown}, user("more")]
            await harness.openai.chat.completions.create(**{**asked, "messages": more})
            known = [*call.prompt_ids, *harness.recorder.ids(call.call_id)]
            assert list(harness.source.calls[-1].prompt_ids)[: len(known)] == known, name
