"""Tools as OpenAI and Anthropic document them: what the model must call it calls, and with arguments of the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.conformance_server import MODEL, Server
from support.conformance_words import ARGUMENTS, CALL, CALLED, ENDS, HI, OTHER_TOOL, TOOL, ending, says

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.serial]
MESSAGES_TOOL = {"name": "measure", "description": "measures", "input_schema": ARGUMENTS}
RESPONSES_TOOL = {"type": "function", "name": "measure", "parameters": ARGUMENTS, "strict": False}
NAMED = {"type": "function", "function": {"name": "measure"}}


def chat(server: Server, **options: Any) -> Any:
    given = {"tools": [TOOL], "temperature": 0, "max_tokens": 200, "messages": HI, **options}
    return server.openai.chat.completions.create(model=MODEL, **given)


def joined(chunks: Any) -> list[dict[str, Any]]:
    """The calls that a stream spells."""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            call = calls.setdefault(part.index, {"id": part.id, "name": "", "arguments": ""})
            call["name"] += part.function.name or ""
            call["arguments"] += part.function.arguments or ""
    return [calls[index] for index in sorted(calls)]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_be_is_made_and_fits_the_schema(server: Server, choice: Any, stream: bool) -> None:
    reply = chat(server, tool_choice=choice, stream=stream, logit_bias=ENDS)
    if stream:
        (call,) = joined(reply)
        name, arguments = call["name"], call["arguments"]
    else:
        (made,) = reply.choices[0].message.tool_calls
        assert made.type == "function" and made.id
        name, arguments = made.function.name, made.function.arguments
    assert name == "measure" and json.loads(arguments) in ARGUMENTS["enum"]


def test_a_required_call_ends_with_tool_calls(server: Server) -> None:
    reply = chat(server, tool_choice="required", logit_bias=ENDS)
    assert reply.choices[0].finish_reason == "tool_calls" and not reply.choices[0].message.content


def test_a_named_call_ends_with_stop(server: Server) -> None:
    assert chat(server, tool_choice=NAMED, logit_bias=ENDS).choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_made_freely_is_found(server: Server, stream: bool) -> None:
    reply = chat(server, tools=[TOOL, OTHER_TOOL], stream=stream, extra_body=says("so: " + CALL))
    if stream:
        chunks = list(reply)
        (call,) = joined(chunks)
        name, arguments = call["name"], call["arguments"]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        message, reason = reply.choices[0].message, reply.choices[0].finish_reason
        (made,) = message.tool_calls
        name, arguments, text = made.function.name, made.function.arguments, message.content
    assert (name, json.loads(arguments), reason) == ("measure", CALLED, "tool_calls") and text.strip() == "so:"


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_calls_are_told_apart(server: Server, stream: bool) -> None:
    reply = chat(server, tools=[TOOL, OTHER_TOOL], stream=stream, extra_body=says(CALL + CALL))
    if stream:
        calls = [(one["id"], one["name"], one["arguments"]) for one in joined(reply)]
    else:
        calls = [(one.id, one.function.name, one.function.arguments) for one in reply.choices[0].message.tool_calls]
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [("measure", CALLED)] * 2
    assert len({identity for identity, _, _ in calls}) == 2


def test_at_most_one_call_where_parallel_ones_are_not_wanted(server: Server) -> None:
    reply = chat(server, parallel_tool_calls=False, extra_body=says(CALL + CALL))
    assert len(reply.choices[0].message.tool_calls) == 1


def test_no_call_where_none_is_wanted(server: Server) -> None:
    reply = chat(server, tool_choice="none", extra_body=says(CALL))
    assert not reply.choices[0].message.tool_calls and reply.choices[0].finish_reason == "stop"


def test_text_without_a_call_is_content(server: Server) -> None:
    reply = chat(server, extra_body=says("no need"))
    assert reply.choices[0].message.content == "no need" and not reply.choices[0].message.tool_calls


def test_the_result_of_a_call_is_taken(server: Server) -> None:
    first = chat(server, extra_body=says(CALL)).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3 km"}
    messages = [*HI, first.model_dump(exclude_none=True), result]
    reply = chat(server, messages=messages, extra_body=says("3 km it is"))
    assert reply.choices[0].message.content == "3 km it is"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "measure"}], ids=["required", "named"])
def test_responses_call_what_must_be_called(server: Server, choice: Any) -> None:
    asked = {"tools": [RESPONSES_TOOL | {"strict": True}], "tool_choice": choice, "max_output_tokens": 90}

    def ask(seed: int) -> Any:
        return server.openai.responses.create(model=MODEL, input="hi", extra_body={"seed": seed}, **asked)

    reply = ending(ask, lambda reply: reply.status == "completed")
    calls = [item for item in reply.output if item.type == "function_call"]
    assert calls and calls[0].name == "measure" and calls[0].call_id
    assert json.loads(calls[0].arguments) in ARGUMENTS["enum"]


def test_responses_find_a_call_made_freely_and_take_its_result(server: Server) -> None:
    asked = {"model": MODEL, "tools": [RESPONSES_TOOL], "max_output_tokens": 200}
    first = server.openai.responses.create(input="hi", extra_body=says(CALL), **asked)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == CALLED
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3 km"}
    conversation = [{"role": "user", "content": "hi"}, call.model_dump(exclude_none=True), result]
    second = server.openai.responses.create(input=conversation, extra_body=says("3 km it is"), **asked)
    assert second.output_text == "3 km it is"


def test_responses_stream_a_call(server: Server) -> None:
    asked = {"model": MODEL, "input": "hi", "tools": [RESPONSES_TOOL], "max_output_tokens": 200}
    events = list(server.openai.responses.create(stream=True, extra_body=says(CALL), **asked))
    spelled = "".join(one.delta for one in events if one.type == "response.function_call_arguments.delta")
    (done,) = [one for one in events if one.type == "response.function_call_arguments.done"]
    assert json.loads(spelled) == json.loads(done.arguments) == CALLED


MUST_CALL = [{"type": "any"}, {"type": "tool", "name": "measure"}]


def calling(server: Server, choice: Any, *, stream: bool = False) -> Any:
    """A message that calls the tool it must."""
    asked = {"model": MODEL, "max_tokens": 90, "messages": HI, "tools": [MESSAGES_TOOL], "tool_choice": choice}

    def ask(_: int) -> Any:
        if not stream:
            return server.anthropic.messages.create(**asked)
        with server.anthropic.messages.stream(**asked) as events:
            return events.get_final_message()

    return ending(ask, lambda reply: reply.stop_reason != "max_tokens")


@pytest.mark.parametrize("choice", MUST_CALL, ids=["any", "tool"])
@pytest.mark.parametrize("stream", [False, True])
def test_messages_call_what_must_be_called(server: Server, choice: Any, stream: bool) -> None:
    calls = [block for block in calling(server, choice, stream=stream).content if block.type == "tool_use"]
    assert calls and calls[0].name == "measure" and calls[0].id and calls[0].input in ARGUMENTS["enum"]


@pytest.mark.parametrize("choice", MUST_CALL, ids=["any", "tool"])
def test_a_message_that_calls_ends_with_tool_use(server: Server, choice: Any) -> None:
    assert calling(server, choice).stop_reason == "tool_use"


def test_messages_take_the_result_of_a_call(server: Server) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "measure", "input": CALLED}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "3 km"}
    messages = [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    reply = server.anthropic.messages.create(model=MODEL, max_tokens=3, messages=messages, tools=[MESSAGES_TOOL])
    assert reply.usage.output_tokens <= 3 and reply.role == "assistant"
