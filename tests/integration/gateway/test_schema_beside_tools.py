"""A JSON schema for the reply, beside tools: the model may call a tool, and only its text is bound to the schema."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from support.gateway import TOOL, TOOL_CALL, GatewayHarness, gateway_harness, user

from seamless_verl.gateway.reply_parser import warn_of_dropped_schemas

pytestmark = pytest.mark.integration
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
FUNCTION: Any = TOOL["function"]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [user("q")],
        "tools": [TOOL],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
    RESPONSES: {
        "input": "q",
        "tools": [{"type": "function", **FUNCTION}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    },
    MESSAGES: {
        "messages": [user("q")],
        "max_tokens": 99,
        "tools": [{"name": "add", "input_schema": FUNCTION["parameters"]}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}
paths = pytest.mark.parametrize("path", BODIES)
NO_TAGS = ("--tool-call-parser", "pythonic")  # vLLM has no grammar for its calls


async def outputs_of(harness: GatewayHarness, path: str, **more: Any) -> dict[str, Any] | None:
    """The structured outputs of a call."""
    url = harness.session["anthropic_base_url"] + path
    reply = await harness.http.post(url, json={"model": "m", **BODIES[path], **more})
    assert reply.status_code == 200, reply.text
    outputs: dict[str, Any] | None = harness.source.calls[-1].sampling.get("structured_outputs")
    return outputs


def accepts(structural_tag: str, text: str) -> bool:
    """Whether the text is a whole reply of the grammar; tokens are bytes here."""
    end = 256
    tokens = xgrammar.TokenizerInfo([*map(chr, range(end)), "<end>"], stop_token_ids=[end])
    grammar = xgrammar.GrammarCompiler(tokens).compile_structural_tag(structural_tag)
    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(text) and matcher.accept_token(end))


@paths
async def test_the_reply_is_a_call_or_the_schemas_json(nano: Path, path: str) -> None:
    async with gateway_harness(nano) as harness:
        outputs = await outputs_of(harness, path)
        assert outputs is not None and outputs.keys() == {"structural_tag"}
        tag = outputs["structural_tag"]
        for text in (TOOL_CALL, f"{TOOL_CALL}{TOOL_CALL}", '{"x": 3}'):
            assert accepts(tag, text), text
        for text in ("", "hello", '{"x": "y"}', '{"x": 3}' + TOOL_CALL, TOOL_CALL.replace("add", "other")):
            assert not accepts(tag, text), text
        assert harness.gateway.metrics()["gateway/schemas_dropped"] == 0


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_strict_tool_does_not_drop_the_schema(nano: Path, path: str) -> None:
    strict: Any = {**FUNCTION, "strict": True}
    tool = {"type": "function", "function": strict} if path == CHAT else {"type": "function", **strict}
    async with gateway_harness(nano) as harness:
        outputs = await outputs_of(harness, path, tools=[tool])
        assert outputs is not None and accepts(outputs["structural_tag"], '{"x": 3}')


@paths
async def test_without_a_choice_the_schema_or_the_call_binds_alone(nano: Path, path: str) -> None:
    none, forced = ({"type": "none"}, {"type": "any"}) if path == MESSAGES else ("none", "required")
    async with gateway_harness(nano) as harness:
        outputs = await outputs_of(harness, path, tool_choice=none)
        assert outputs is not None and outputs["json"] == SCHEMA
        outputs = await outputs_of(harness, path, tool_choice=forced)
        assert outputs is not None and not accepts(outputs["structural_tag"], '{"x": 3}')


@paths
async def test_where_calls_have_no_grammar_the_schema_is_left_out(
    nano: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_dropped_schemas.cache_clear()
    async with gateway_harness(nano, NO_TAGS) as harness:
        with caplog.at_level(logging.WARNING, "seamless_verl.gateway"):
            for _ in range(2):
                assert await outputs_of(harness, path) is None
        assert harness.gateway.metrics()["gateway/schemas_dropped"] == 2
        assert sum("is left out" in record.message for record in caplog.records) == 1
        none = {"type": "none"} if path == MESSAGES else "none"
        outputs = await outputs_of(harness, path, tool_choice=none)
        assert outputs is not None and outputs["json"] == SCHEMA


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_given_and_then_the_json(nano: Path, stream: bool) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies(TOOL_CALL, '{"x": 5}')
        asked: Any = {"model": "m", "stream": stream, **BODIES[RESPONSES]}
        asked.pop("input")
        items: list[Any] = [user("q")]
        for kind in ("function_call", "message"):
            reply: Any = await harness.openai.responses.create(input=items, **asked)
            if stream:
                reply = [event async for event in reply][-1].response
            (item,) = reply.output
            assert item.type == kind
            items.append(item.model_dump(exclude_none=True))
            if kind == "function_call":
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": "5"})
        assert json.loads(reply.output_text) == {"x": 5}
