"""Chat completions as OpenAI documents them, through its SDK."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import openai
import pydantic
import pytest
from support.conformance_server import MODEL, Server
from support.conformance_words import HI, HI_TOKENS, LONG, NO_BLANKS, PARAMETERS, TALE, conforms, says, thinks_then_says

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.serial]


def chat(server: Server, messages: Any = HI, **options: Any) -> Any:
    return server.openai.chat.completions.create(model=MODEL, messages=messages, **options)


def said(chunks: Iterable[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_a_reply_has_the_documented_fields(server: Server) -> None:
    reply = chat(server, extra_body=says("hello there"))
    assert reply.id.startswith("chatcmpl-") and reply.object == "chat.completion" and reply.model == MODEL
    assert abs(reply.created - time.time()) < 60
    (choice,) = reply.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "hello there")
    assert not choice.message.tool_calls and choice.message.refusal is None


def test_usage_counts_tokens(server: Server) -> None:
    usage = chat(server, extra_body=says("hello there")).usage
    spoken = len("hello there") + 1  # a token a byte, and the end of the turn
    assert (usage.prompt_tokens, usage.completion_tokens) == (HI_TOKENS, spoken)
    assert usage.total_tokens == HI_TOKENS + spoken


def test_a_stream_spells_the_reply(server: Server) -> None:
    chunks = list(chat(server, stream=True, extra_body=says("hello there")))
    assert said(chunks) == "hello there"
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_tells_its_usage_when_asked(server: Server) -> None:
    options = {"stream_options": {"include_usage": True}, "extra_body": says("hello")}
    *before, last = chat(server, stream=True, **options)
    assert last.choices == [] and (last.usage.prompt_tokens, last.usage.completion_tokens) == (HI_TOKENS, 6)
    assert all(chunk.usage is None for chunk in before)


def test_a_stream_is_server_sent_events_that_end_with_done(server: Server) -> None:
    body = {"model": MODEL, "messages": HI, "stream": True, "max_tokens": 3}
    reply = server.post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])


def test_the_sdks_stream_helper_assembles_the_reply(server: Server) -> None:
    with server.openai.chat.completions.stream(model=MODEL, messages=HI, extra_body=says("hello there")) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and kinds[-1] == "content.done"
    assert final.choices[0].message.content == "hello there"


async def test_an_asynchronous_client_does_the_same(server: Server) -> None:
    async def run_case() -> list[Any]:
        given = {"base_url": f"{server.url}/v1", "api_key": server.key, "max_retries": 0}
        async with openai.AsyncOpenAI(**given) as client:
            asked = {"model": MODEL, "messages": HI, "extra_body": says("hello")}
            whole = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(4)))
            stream = await client.chat.completions.create(stream=True, **asked)
            return [*(one.choices[0].message.content for one in whole), said([chunk async for chunk in stream])]

    assert await run_case() == ["hello"] * 5


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_are_independent(server: Server, stream: bool) -> None:
    asked = {"n": 3, "seed": 1, "max_completion_tokens": 8, "extra_body": LONG}
    if stream:
        *chunks, last = chat(server, stream=True, stream_options={"include_usage": True}, **asked)
        texts, usage = [said(chunks, index) for index in range(3)], last.usage
    else:
        reply = chat(server, **asked)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        texts, usage = [choice.message.content for choice in reply.choices], reply.usage
    assert len(set(texts)) == 3
    assert (usage.prompt_tokens, usage.completion_tokens) == (HI_TOKENS, 24)


@pytest.mark.parametrize("stop", ["the", ["the"], ["never said", "the"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_ends_the_reply_and_is_left_out(server: Server, stop: Any, stream: bool) -> None:
    reply = chat(server, stop=stop, stream=stream, extra_body=says("hello there"))
    if stream:
        chunks = list(reply)
        text, reason = said(chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
        assert reply.usage.completion_tokens == len("hello the")
    assert (text, reason) == ("hello ", "stop")


def test_a_seed_repeats_a_reply_and_another_does_not(server: Server) -> None:
    texts = [chat(server, seed=seed, max_tokens=12).choices[0].message.content for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_temperature_zero_repeats_a_reply_whatever_the_seed(server: Server) -> None:
    texts = [chat(server, seed=seed, temperature=0, max_tokens=12).choices[0].message.content for seed in (3, 4)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_budget_ends_a_reply_with_length(server: Server, name: str, stream: bool) -> None:
    asked = {name: 5, "extra_body": LONG}
    if stream:
        *chunks, last = chat(server, stream=True, stream_options={"include_usage": True}, **asked)
        reason, usage = chunks[-1].choices[0].finish_reason, last.usage
    else:
        reply = chat(server, **asked)
        reason, usage = reply.choices[0].finish_reason, reply.usage
    assert (reason, usage.completion_tokens) == ("length", 5)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_come_for_each_token_likeliest_first(server: Server, stream: bool) -> None:
    reply = chat(server, logprobs=True, top_logprobs=4, stream=stream, temperature=0, max_tokens=6)
    if stream:
        told = [chunk.choices[0].logprobs for chunk in reply]
        entries = [entry for one in told if one is not None for entry in one.content]
    else:
        entries = reply.choices[0].logprobs.content
        assert len(entries) == reply.usage.completion_tokens
    for entry in entries:
        values = [one.logprob for one in entry.top_logprobs]
        assert len(values) == 4 and values == sorted(values, reverse=True) and sum(map(math.exp, values)) <= 1
        assert entry.token == entry.top_logprobs[0].token and entry.logprob == values[0]


def test_logprobs_spell_the_reply(server: Server) -> None:
    entries = chat(server, logprobs=True, extra_body=says("hé")).choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries[:-1]) == "hé".encode()
    assert all(entry.logprob <= 0 for entry in entries)


def test_logprobs_without_the_likeliest(server: Server) -> None:
    reply = chat(server, logprobs=True, max_tokens=3, extra_body=LONG)
    assert [entry.top_logprobs for entry in reply.choices[0].logprobs.content] == [[], [], []]


def test_a_bias_decides_between_tokens(server: Server) -> None:
    reply = chat(server, logit_bias={str(ord("z")): 100}, max_tokens=4)
    assert reply.choices[0].message.content == "zzzz"


def test_content_in_parts_is_content(server: Server) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    whole, parted = (chat(server, messages, temperature=0, max_tokens=4) for messages in (HI, parts))
    assert (parted.choices[0].message, parted.usage) == (whole.choices[0].message, whole.usage)


def test_a_system_message_is_part_of_the_prompt(server: Server) -> None:
    system = [{"role": "system", "content": "be brief"}, *HI]
    assert chat(server, system, max_tokens=1).usage.prompt_tokens == HI_TOKENS + len("be brief") + 3


def test_a_conversation_goes_on(server: Server) -> None:
    first = chat(server, extra_body=says("hello"))
    messages = [*HI, {"role": "assistant", "content": first.choices[0].message.content}, *HI]
    second = chat(server, messages, extra_body=says("again"))
    assert second.choices[0].message.content == "again"
    assert second.usage.prompt_tokens == 2 * HI_TOKENS + len("hello") + 1


def test_a_conversation_goes_on_with_the_tokens_that_were_generated(server: Server) -> None:
    """A reply whose text does not tell of its tokens: the prompt grows by those, not by the text's."""
    first = chat(server, seed=5, max_tokens=16, extra_body=LONG)
    text = first.choices[0].message.content
    second = chat(server, [*HI, {"role": "assistant", "content": text}, *HI], max_tokens=1)
    assert "\ufffd" in text
    grown = second.usage.prompt_tokens - first.usage.prompt_tokens - first.usage.completion_tokens
    assert grown == 1 + HI_TOKENS  # the end of the turn, which was not generated, and the new message


def test_text_of_any_language_survives(server: Server) -> None:
    text = "naïve 漢字 🙂"
    assert chat(server, extra_body=says(text)).choices[0].message.content == text
    assert said(chat(server, stream=True, extra_body=says(text))) == text


def test_json_schema_gives_json_of_that_schema(server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "m", "schema": PARAMETERS, "strict": True}}
    reply = chat(server, temperature=0, max_tokens=100, response_format=schema, logit_bias=NO_BLANKS)
    assert reply.choices[0].finish_reason == "stop" and conforms(json.loads(reply.choices[0].message.content))


def test_json_object_gives_an_object(server: Server) -> None:
    bias = {str(ord("}")): 100}
    reply = chat(server, temperature=0, max_tokens=20, response_format={"type": "json_object"}, logit_bias=bias)
    assert json.loads(reply.choices[0].message.content) == {}


class Measure(pydantic.BaseModel):
    unit: Literal["m", "km"]
    exact: bool


def test_the_sdk_parses_into_a_model(server: Server) -> None:
    reply = server.openai.chat.completions.parse(
        model=MODEL, messages=HI, response_format=Measure, temperature=0, max_tokens=100, logit_bias=NO_BLANKS
    )
    assert isinstance(reply.choices[0].message.parsed, Measure)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_comes_apart_from_content(server: Server, stream: bool) -> None:
    reply = chat(server, stream=stream, seed=3, max_tokens=200, extra_body=thinks_then_says("four"))
    if stream:
        deltas = [chunk.choices[0].delta for chunk in reply]
        content = "".join(delta.content or "" for delta in deltas)
        reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    else:
        content, reasoning = reply.choices[0].message.content, reply.choices[0].message.reasoning
    assert content == "four" and reasoning and "</think>" not in reasoning


def test_reasoning_tokens_are_counted(server: Server) -> None:
    usage = chat(server, seed=3, max_tokens=200, extra_body=thinks_then_says("four")).usage
    reasoned = usage.completion_tokens_details.reasoning_tokens
    assert reasoned > 0 and usage.completion_tokens == reasoned + 1 + len("four") + 1


def test_json_after_reasoning(server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "m", "schema": {"const": "four"}}}
    extra = {name: value for name, value in thinks_then_says("").items() if name != "structured_outputs"}
    reply = chat(server, seed=3, max_tokens=200, response_format=schema, extra_body=extra)
    assert json.loads(reply.choices[0].message.content) == "four" and reply.choices[0].message.reasoning


@pytest.mark.parametrize(
    "option", [{"user": "u"}, {"metadata": {"a": "b"}}, {"store": False}, {"service_tier": "auto"}]
)
def test_what_does_not_matter_here_is_taken(server: Server, option: dict[str, Any]) -> None:
    assert chat(server, max_tokens=1, **option).usage.completion_tokens == 1


def test_a_developer_message_is_taken(server: Server) -> None:
    assert chat(server, [{"role": "developer", "content": "be brief"}, *HI], max_tokens=1).choices


REFUSED: dict[str, Callable[[Server], Any]] = {
    "no messages": lambda server: chat(server, []),
    "n of 0": lambda server: chat(server, n=0),
    "a penalty of 3": lambda server: chat(server, presence_penalty=3),
    "a temperature below 0": lambda server: chat(server, temperature=-1),
    "a temperature of 3": lambda server: chat(server, temperature=3, max_tokens=1),
    "top_p of 2": lambda server: chat(server, top_p=2),
    "top_logprobs alone": lambda server: chat(server, top_logprobs=2),
    "21 top_logprobs": lambda server: chat(server, logprobs=True, top_logprobs=21),
    "a budget of 0": lambda server: chat(server, max_tokens=0),
    "a bias of no token": lambda server: chat(server, logit_bias={"100000": 1}, max_tokens=1),
    "a role there is not": lambda server: chat(server, [{"role": "chorus", "content": "hi"}]),
    "stream_options alone": lambda server: chat(server, stream_options={"include_usage": True}),
    "a schema that is none": lambda server: chat(
        server, response_format={"type": "json_schema", "json_schema": {"name": "m", "schema": {"type": "nothing"}}}
    ),
    "a format there is not": lambda server: chat(server, response_format={"type": "verse"}),
    "an image for a model without eyes": lambda server: chat(
        server,
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}],
    ),
    "a prompt past the model's length": lambda server: chat(server, [{"role": "user", "content": "x" * 1100}]),
    "a budget past the model's length": lambda server: chat(server, TALE, max_tokens=1100),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_request_is_refused(server: Server, what: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        REFUSED[what](server)
    error = refused.value.body
    assert isinstance(error, dict) and error["message"] and "type" in error and "Traceback" not in str(error)
