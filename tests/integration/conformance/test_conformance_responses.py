"""Responses as OpenAI documents them, and the older completions and the list of models."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from support.conformance_server import LONGEST, MODEL, Server
from support.conformance_words import ARGUMENTS, HI_TOKENS, LONG, says

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.serial]


def respond(server: Server, said: Any = "hi", **options: Any) -> Any:
    return server.openai.responses.create(model=MODEL, input=said, **options)


def complete(server: Server, prompt: Any = "hi", **options: Any) -> Any:
    return server.openai.completions.create(model=MODEL, prompt=prompt, **options)


def test_a_response_has_the_documented_fields(server: Server) -> None:
    reply = respond(server, extra_body=says("hello"))
    assert reply.id.startswith("resp_") and (reply.object, reply.status, reply.model) == (
        "response",
        "completed",
        MODEL,
    )
    assert reply.output_text == "hello" and reply.error is None and reply.incomplete_details is None
    (message,) = reply.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    usage = reply.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (HI_TOKENS, 6, HI_TOKENS + 6)


def test_a_responses_stream_tells_each_step(server: Server) -> None:
    events = list(respond(server, stream=True, extra_body=says("hello")))
    steps = list(dict.fromkeys(event.type for event in events))
    assert steps == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "hello"
    final = events[-1].response
    assert (final.status, final.output_text, final.usage.output_tokens) == ("completed", "hello", 6)


def test_the_sdks_responses_helper_assembles_the_reply(server: Server) -> None:
    with server.openai.responses.stream(model=MODEL, input="hi", extra_body=says("hello")) as stream:
        assert stream.until_done().get_final_response().output_text == "hello"


async def test_an_asynchronous_client_gets_a_response(server: Server) -> None:
    async def run_case() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key) as client:
            stream = await client.responses.create(model=MODEL, input="hi", stream=True, extra_body=says("hello"))
            parts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            return "".join(parts)

    assert await run_case() == "hello"


@pytest.mark.parametrize("stream", [False, True])
def test_the_budget_leaves_a_response_incomplete(server: Server, stream: bool) -> None:
    asked = {"max_output_tokens": 4, "extra_body": LONG}
    reply = list(respond(server, stream=True, **asked))[-1].response if stream else respond(server, **asked)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.usage.output_tokens == 4


def test_an_incomplete_stream_ends_with_its_own_event(server: Server) -> None:
    events = list(respond(server, stream=True, max_output_tokens=4, extra_body=LONG))
    assert events[-1].type == "response.incomplete"


def test_instructions_are_a_system_message(server: Server) -> None:
    reply = respond(server, instructions="be brief", max_output_tokens=1)
    assert reply.usage.input_tokens == HI_TOKENS + len("be brief") + 3 and reply.instructions == "be brief"


def test_input_is_a_conversation_too(server: Server) -> None:
    first = respond(server, extra_body=says("hello"))
    turns = [{"role": "user", "content": "hi"}, *(one.model_dump(exclude_none=True) for one in first.output)]
    second = respond(server, [*turns, {"role": "user", "content": "hi"}], extra_body=says("again"))
    assert second.output_text == "again" and second.usage.input_tokens == 2 * HI_TOKENS + 6


def test_temperature_zero_repeats_a_response(server: Server) -> None:
    first, second = (respond(server, temperature=0, max_output_tokens=12).output_text for _ in range(2))
    assert first == second


def test_a_text_format_gives_json_of_that_schema(server: Server) -> None:
    form = {"format": {"type": "json_schema", "name": "m", "schema": ARGUMENTS, "strict": True}}
    reply = respond(server, text=form, temperature=0, max_output_tokens=100)
    assert json.loads(reply.output_text) in ARGUMENTS["enum"]


def test_logprobs_of_a_response_are_included_when_asked(server: Server) -> None:
    include = ["message.output_text.logprobs"]
    reply = respond(server, include=include, top_logprobs=2, max_output_tokens=4, temperature=0, extra_body=LONG)
    entries = reply.output[0].content[0].logprobs
    assert len(entries) == 4 and all(len(entry.top_logprobs) == 2 for entry in entries)


def test_a_response_can_be_asked_for_again(server: Server) -> None:
    first = respond(server, max_output_tokens=2)
    assert server.openai.responses.retrieve(first.id).id == first.id


def test_a_response_follows_another(server: Server) -> None:
    first = respond(server, extra_body=says("hello"))
    assert respond(server, previous_response_id=first.id, max_output_tokens=1).usage.input_tokens > HI_TOKENS + 6


def test_a_response_that_is_not_known_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve("resp_unknown")


def test_a_response_after_one_that_is_not_known_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        respond(server, previous_response_id="resp_unknown")


def test_a_completion_has_the_documented_fields(server: Server) -> None:
    reply = complete(server, temperature=0, max_tokens=6)
    assert reply.id.startswith("cmpl-") and (reply.object, reply.model) == ("text_completion", MODEL)
    (choice,) = reply.choices
    assert (choice.index, choice.finish_reason) == (0, "length") and choice.logprobs is None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2, 6)


def test_a_completion_stops_at_sixteen_tokens_by_itself(server: Server) -> None:
    assert complete(server, extra_body=LONG).usage.completion_tokens == 16


def test_a_streamed_completion_spells_the_whole_one(server: Server) -> None:
    asked = {"temperature": 0, "max_tokens": 8, "extra_body": LONG}
    whole = complete(server, **asked).choices[0].text
    *chunks, last = complete(server, stream=True, stream_options={"include_usage": True}, **asked)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole
    assert last.choices == [] and last.usage.completion_tokens == 8


def test_completions_take_several_prompts_and_choices(server: Server) -> None:
    reply = complete(server, ["ab", "c"], n=2, max_tokens=3, extra_body=LONG)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 12)


def test_completions_take_tokens(server: Server) -> None:
    text, ids = (complete(server, prompt, temperature=0, max_tokens=6) for prompt in ("hi", [104, 105]))
    assert (text.choices[0].text, text.usage) == (ids.choices[0].text, ids.usage)


def test_a_completion_echoes_its_prompt(server: Server) -> None:
    assert complete(server, "hi", echo=True, max_tokens=2).choices[0].text.startswith("hi")


def test_a_completion_gives_logprobs(server: Server) -> None:
    told = complete(server, logprobs=2, temperature=0, max_tokens=4, extra_body=LONG).choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == 4
    assert [max(top.values()) for top in told.top_logprobs] == told.token_logprobs


def test_a_completion_echoes_with_logprobs(server: Server) -> None:
    told = complete(server, "hi", echo=True, logprobs=1, max_tokens=2, extra_body=LONG).choices[0].logprobs
    assert len(told.token_logprobs) == 4 and told.token_logprobs[0] is None


def test_a_completion_stops_and_is_seeded(server: Server) -> None:
    texts = [complete(server, seed=seed, max_tokens=12).choices[0].text for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    letter = next(character for character in texts[0][1:] if character not in (texts[0][0], "\ufffd"))
    cut = complete(server, seed=3, max_tokens=12, stop=letter).choices[0]
    assert (cut.text, cut.finish_reason) == (texts[0][: texts[0].index(letter)], "stop")


def test_the_models_are_listed(server: Server) -> None:
    (model,) = server.openai.models.list().data
    assert (model.id, model.object) == (MODEL, "model") and model.created and model.owned_by
    assert model.max_model_len == LONGEST


def test_one_model_is_described(server: Server) -> None:
    assert server.openai.models.retrieve(MODEL).id == MODEL


REFUSED: dict[str, Callable[[Server], Any]] = {
    "no budget": lambda server: complete(server, max_tokens=0, echo=False),
    "too many logprobs": lambda server: complete(server, logprobs=21),
    "a prompt past the model's length": lambda server: complete(server, "x" * 1100),
    "tokens past the model's length": lambda server: complete(server, [1] * 1100),
    "a token there is not": lambda server: complete(server, [100_000]),
    "no prompt": lambda server: complete(server, []),
    "a suffix": lambda server: complete(server, suffix="after"),
    "a response past the model's length": lambda server: respond(server, "x" * 1100),
    "a response's budget of 0": lambda server: respond(server, max_output_tokens=0),
    "a response of no format": lambda server: respond(server, text={"format": {"type": "verse"}}),
    "a response of a strange item": lambda server: respond(server, [{"type": "dance"}]),
    "a response's bad tool": lambda server: respond(server, tools=[{"type": "function"}]),
    "a response in the background": lambda server: respond(server, background=True, store=False),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_request_is_refused(server: Server, what: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        REFUSED[what](server)
    error = refused.value.body
    assert isinstance(error, dict) and error["message"] and "type" in error and "Traceback" not in str(error)
