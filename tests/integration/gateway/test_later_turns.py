"""A reply behind turns with thoughts, which a session's prompt keeps, is parsed as the first one is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from support.gateway import GatewayHarness, gateway_harness, user

from seamless_verl.gateway import reply_parser

pytestmark = pytest.mark.integration
FIRST, SECOND = "<think>hm one</think>first", "<think>hm two</think>second"
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


async def chat(harness: GatewayHarness, question: str, stream: bool) -> tuple[str, str]:
    """Thoughts and text of a second turn."""
    create = harness.openai.chat.completions.create
    said = (await create(model="nano", messages=[user(question)])).choices[0].message.content
    conversation: Any = [user(question), {"role": "assistant", "content": said}, user("more")]
    if not stream:
        message = (await create(model="nano", messages=conversation)).choices[0].message
    else:
        state: Any = ChatCompletionStreamState()
        async for chunk in await create(model="nano", messages=conversation, stream=True):
            state.handle_chunk(chunk)
        message = state.current_completion_snapshot.choices[0].message
    return message.model_extra["reasoning"], message.content


async def messages(harness: GatewayHarness, question: str, stream: bool) -> tuple[str, str]:
    asked: dict[str, Any] = {"model": "nano", "max_tokens": 500}
    first: Any = await harness.anthropic.messages.create(**asked, messages=[user(question)])
    conversation: Any = [user(question), {"role": "assistant", "content": first.content}, user("more")]
    async with harness.anthropic.messages.stream(**asked, messages=conversation) as events:
        message = await events.get_final_message()
    if not stream:
        message = await harness.anthropic.messages.create(**asked, messages=conversation)
    return said_in(message.content, "thinking"), said_in(message.content, "text")


async def responses(harness: GatewayHarness, question: str, stream: bool) -> tuple[str, str]:
    create = harness.openai.responses.create
    asked: dict[str, Any] = {"model": "nano", "store": False}
    first = await create(**asked, input=[user(question)])
    conversation: Any = [user(question), *(item.model_dump(exclude_none=True) for item in first.output), user("more")]
    reply: Any = await create(**asked, input=conversation, stream=stream)
    if stream:
        reply = [event async for event in reply][-1].response
    parts = {item.type: item.content for item in reply.output}
    return parts["reasoning"][0].text, parts["message"][0].text


def said_in(blocks: Any, kind: str) -> str:
    return "".join(getattr(block, kind) for block in blocks if block.type == kind)


APIS = {"chat": chat, "messages": messages, "responses": responses}


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
async def test_thoughts_of_a_later_turn_are_said_as_thoughts(nano: Path, parser: str) -> None:
    async with gateway_harness(nano, ("--reasoning-parser", parser)) as harness:
        for name, api in APIS.items():
            for stream in (False, True):
                harness.set_replies(FIRST, *[SECOND] * 2, size=3)
                assert await api(harness, f"{name} {stream}", stream) == ("hm two", "second"), (name, stream)
                assert "<think>hm one</think>first" in harness.prompt(), "the session keeps what was generated"


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
async def test_a_grammar_of_a_later_turn_begins_after_its_thoughts(nano: Path, parser: str) -> None:
    async with gateway_harness(nano, ("--reasoning-parser", parser)) as harness:
        harness.set_replies(FIRST, '<think>hm</think>{"a": 1}')
        create = harness.openai.chat.completions.create
        ended = []
        for conversation in ([user("q")], [user("q"), {"role": "assistant", "content": "first"}, user("more")]):
            await create(model="nano", messages=conversation, response_format=JSON)
            ended.append(harness.source.calls[-1].sampling["reasoning_ended"])
        assert ended == [False, False]


async def test_a_prompt_is_looked_through_once_for_all_parts(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []
    last_turn = reply_parser._ConsistentParser._last_turn

    def counted(self: Any, ids: Any) -> list[int]:
        prompts.append(len(ids))
        return last_turn(self, ids)

    monkeypatch.setattr(reply_parser._ConsistentParser, "_last_turn", counted)
    async with gateway_harness(nano, ("--reasoning-parser", "qwen3")) as harness:
        harness.set_replies(FIRST, SECOND + " and so on" * 5, size=1)
        assert (await chat(harness, "q", True))[0] == "hm two"
    assert 0 < len(prompts) <= 4
