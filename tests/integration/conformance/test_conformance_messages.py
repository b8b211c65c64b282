"""Messages as Anthropic documents them, through its SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from support.conformance_server import MODEL, Server
from support.conformance_words import ARGUMENTS, HI, HI_TOKENS, TALE, ending, thinks_then_says

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.serial]

GREEDY = {"temperature": 0}  # the API has it, this SDK no longer


def ask(server: Server, messages: Any = HI, **options: Any) -> Any:
    given = {"model": MODEL, "max_tokens": 16, "messages": messages, **options}
    return server.anthropic.messages.create(**given)


def spoken(text: str) -> dict[str, Any]:
    """Options with which the model says this, in the quotes of JSON."""
    return {"output_config": {"format": {"type": "json_schema", "schema": {"const": text}}}}


def test_a_message_has_the_documented_fields(server: Server) -> None:
    reply = ask(server, **spoken("hello"))
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", MODEL) and reply.id
    assert [block.type for block in reply.content] == ["text"]
    assert (reply.content[0].text, reply.stop_reason, reply.stop_sequence) == ('"hello"', "end_turn", None)
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (HI_TOKENS, 8)


def test_the_id_of_a_message_is_a_messages(server: Server) -> None:
    assert ask(server, max_tokens=1).id.startswith("msg_")


def test_a_stream_of_a_message_tells_each_step(server: Server) -> None:
    events = list(ask(server, stream=True, **spoken("hello")))
    steps = [event.type for event in events if event.type != "ping"]
    assert list(dict.fromkeys(steps)) == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    start, end = events[0].message, events[-2]
    assert (start.role, start.content, start.stop_reason) == ("assistant", [], None)
    assert start.usage.input_tokens == HI_TOKENS
    assert (end.delta.stop_reason, end.usage.output_tokens) == ("end_turn", 8)


def test_the_sdks_stream_helper_assembles_the_message(server: Server) -> None:
    with server.anthropic.messages.stream(model=MODEL, max_tokens=16, messages=HI, **spoken("hello")) as stream:
        assert "".join(stream.text_stream) == '"hello"'
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason, final.usage.output_tokens) == ('"hello"', "end_turn", 8)


async def test_an_asynchronous_client_does_the_same(server: Server) -> None:
    async def run_case() -> list[str]:
        given = {"base_url": server.url, "auth_token": server.key, "max_retries": 0}
        asked = {"model": MODEL, "max_tokens": 16, "messages": HI, **spoken("hello")}
        async with anthropic.AsyncAnthropic(**given) as client:
            whole = await asyncio.gather(*(client.messages.create(**asked) for _ in range(3)))
            async with client.messages.stream(**asked) as stream:
                streamed = "".join([text async for text in stream.text_stream])
            return [*(one.content[0].text for one in whole), streamed]

    assert await run_case() == ['"hello"'] * 4


def test_the_budget_ends_a_message(server: Server) -> None:
    reply = ask(server, TALE, max_tokens=3, **spoken("a long tale"))
    assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_ends_a_message_and_is_named(server: Server, stream: bool) -> None:
    options = {"stop_sequences": ["never said", "lo"], **spoken("hello there")}
    if stream:
        with server.anthropic.messages.stream(model=MODEL, max_tokens=32, messages=HI, **options) as events:
            reply = events.get_final_message()
    else:
        reply = ask(server, max_tokens=32, **options)
    assert (reply.content[0].text, reply.stop_reason, reply.stop_sequence) == ('"hel', "stop_sequence", "lo")


def test_a_system_prompt_is_part_of_the_prompt(server: Server) -> None:
    assert ask(server, system="be brief", max_tokens=1).usage.input_tokens == HI_TOKENS + len("be brief") + 3
    blocks = [{"type": "text", "text": "be brief"}]
    assert ask(server, system=blocks, max_tokens=1).usage.input_tokens == HI_TOKENS + len("be brief") + 3


def test_a_conversation_goes_on(server: Server) -> None:
    first = ask(server, **spoken("hello"))
    turn = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
    second = ask(server, [*HI, turn, *HI], **spoken("again"))
    assert second.content[0].text == '"again"' and second.usage.input_tokens == 2 * HI_TOKENS + 8


def test_counted_tokens_are_those_of_the_prompt(server: Server) -> None:
    asked = {"model": MODEL, "messages": TALE, "system": "be brief"}
    counted = server.anthropic.messages.count_tokens(**asked)
    assert counted.input_tokens == server.anthropic.messages.create(max_tokens=1, **asked).usage.input_tokens


def test_temperature_zero_repeats_a_message(server: Server) -> None:
    assert ask(server, TALE, extra_body=GREEDY).content == ask(server, TALE, extra_body=GREEDY).content


def test_top_k_of_one_is_greedy(server: Server) -> None:
    assert ask(server, TALE, extra_body={"top_k": 1}).content == ask(server, TALE, extra_body=GREEDY).content


def test_an_output_format_gives_json_of_that_schema(server: Server) -> None:
    form = {"format": {"type": "json_schema", "schema": ARGUMENTS}}
    reply = ask(server, max_tokens=200, output_config=form)
    assert json.loads(reply.content[0].text) in ARGUMENTS["enum"]


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_a_block_of_its_own(server: Server, stream: bool) -> None:
    """Sampled, as the API has no seed: a reply whose very first token ends it has no block."""
    template = {"chat_template_kwargs": thinks_then_says("")["chat_template_kwargs"]}

    def asked(_: int) -> Any:
        options = {"max_tokens": 40, "extra_body": template}
        if not stream:
            return ask(server, **options)
        with server.anthropic.messages.stream(model=MODEL, messages=HI, **options) as events:
            return events.get_final_message()

    reply = ending(asked, lambda reply: bool(reply.content))
    assert reply.content[0].type == "thinking" and reply.content[0].thinking


REFUSED: dict[str, Callable[[Server], Any]] = {
    "no budget": lambda server: ask(server, max_tokens=0),
    "no messages": lambda server: ask(server, []),
    "a strange role": lambda server: ask(server, [{"role": "chorus", "content": "hi"}]),
    "a strange block": lambda server: ask(server, [{"role": "user", "content": [{"type": "dance"}]}]),
    "a tool without a schema": lambda server: ask(server, tools=[{"name": "measure"}]),
    "a choice of no tool": lambda server: ask(
        server, tools=[{"name": "a", "input_schema": ARGUMENTS}], tool_choice={"type": "tool", "name": "b"}
    ),
    "a temperature below 0": lambda server: ask(server, extra_body={"temperature": -1}),
    "a prompt past the model's length": lambda server: ask(server, [{"role": "user", "content": "x" * 1100}]),
    "a budget past the model's length": lambda server: ask(server, max_tokens=1100),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_request_is_refused(server: Server, what: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        REFUSED[what](server)
    told = refused.value.body
    assert isinstance(told, dict) and told.get("type") == "error" and told["error"]["message"]
    assert "Traceback" not in str(told)


def test_an_error_has_a_documented_type(server: Server) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(server, extra_body={"temperature": -1})
    assert refused.value.body["error"]["type"] == "invalid_request_error"


def test_a_model_that_is_not_there_has_a_documented_type(server: Server) -> None:
    with pytest.raises(anthropic.NotFoundError) as refused:
        ask(server, model="other")
    assert refused.value.body["error"]["type"] == "not_found_error"
