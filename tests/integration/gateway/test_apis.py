"""Each API through its own SDK, streamed and whole, over scripted replies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from support.gateway import EOS, TOOL, TOOL_CALL, GatewayHarness, Reply, gateway_harness, user
from support.hosts import VLLM

from seamless_verl.gateway.outputs import STREAM_INTERVAL
from seamless_verl.gateway.prefix_index import PrefixIndex
from seamless_verl.gateway.request_rules import RequestRules
from seamless_verl.trajectory.records import Finish, tokens

pytestmark = pytest.mark.integration
HI = [user("hi")]


def chat(harness: GatewayHarness, **options: Any) -> Any:
    return harness.openai.chat.completions.create(model="nano", messages=options.pop("messages", HI), **options)


async def deltas(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


async def test_chat_answers_with_text_usage_and_finish(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("hello")
        reply = await chat(harness)
        assert reply.choices[0].message.content == "hello"
        assert reply.choices[0].finish_reason == "stop"
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (7, 6)
        assert harness.prompt() == "<|im_start|><|user|>hi<|im_end|><|im_start|><|assistant|>"
        call = harness.source.calls[0]
        assert harness.recorder.events[1:] == [
            ("started", call.call_id),
            *[("chunk", call.call_id, [token]) for token in [*b"hello", EOS]],
            ("ended", call.call_id, Finish.STOP, {"message": {"role": "assistant", "content": "hello"}}),
        ]


async def test_a_streamed_chat_arrives_in_chunks(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("hello")
        chunks = await deltas(await chat(harness, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
        assert len(chunks) > 3
        assert chunks[-1].usage.completion_tokens == 6
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_tool_calls_are_parsed_by_the_models_parser(nano: Path, size: int) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("sum: " + TOOL_CALL, size=size)
        reply = await chat(harness, tools=[TOOL])
        assert reply.choices[0].finish_reason == "tool_calls"
        (call,) = reply.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
        (_, finish, recorded_reply) = harness.recorder.ends()[0]
        assert finish is Finish.TOOL_CALLS
        assert recorded_reply["message"]["tool_calls"][0]["function"]["name"] == "add"
        chunks = await deltas(await chat(harness, tools=[TOOL], stream=True))
        parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
        assert json.loads("".join(part.function.arguments or "" for part in parts)) == {"a": 2, "b": 3}


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_are_several_calls(nano: Path, stream: bool) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("one", "three")
        reply = await chat(harness, n=2, stream=stream)
        if stream:
            texts = ["", ""]
            for chunk in await deltas(reply):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        else:
            texts = [choice.message.content for choice in reply.choices]
        assert sorted(texts) == ["one", "three"]
        assert len({call.call_id for call in harness.source.calls}) == 2
        assert len(harness.recorder.ends()) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 4, 100])
async def test_a_stop_string_ends_the_call_wherever_chunks_end(nano: Path, stream: bool, size: int) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("one ENDING two three", size=size)
        reply = await chat(harness, stop=["DING"], stream=stream)
        if stream:
            chunks = await deltas(reply)
            text, choice = (
                "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
                chunks[-1].choices[0],
            )
        else:
            text, choice = reply.choices[0].message.content, reply.choices[0]
        assert (text, choice.finish_reason, choice.stop_reason) == ("one EN", "stop", "DING")
        await harness.drain()
        call = harness.source.calls[0]
        assert harness.recorder.ids(call.call_id) == harness.ids("one ENDING")  # what follows was never generated
        assert "stop" not in call.sampling
        if size < 100:
            assert harness.source.aborted == [call.call_id]


async def test_logprobs_are_given_when_asked_for_and_always_fetched(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("ab")
        reply = await chat(harness, logprobs=True, top_logprobs=3)
        content = reply.choices[0].logprobs.content
        assert [entry.token for entry in content][:2] == ["a", "b"]
        assert [entry.logprob for entry in content] == [-0.25] * 3
        assert [one.token for one in content[1].top_logprobs] == ["b", "a", "c"]
        assert [one.token for one in content[2].top_logprobs] == ["<|im_end|>", "a", "b"]
        assert harness.source.calls[0].sampling["logprobs"] == 3
        reply = await chat(harness, logprobs=True, top_logprobs=0)
        assert [entry.logprob for entry in reply.choices[0].logprobs.content] == [-0.25] * 3
        assert (await chat(harness)).choices[0].logprobs is None
        assert harness.source.calls[2].sampling["logprobs"] == 0


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_characters_split_by_chunks_arrive_whole(nano: Path, size: int) -> None:
    async with gateway_harness(nano) as harness:
        text = "naïve 漢字 🙂"
        harness.set_replies(text, size=size)
        chunks = await deltas(await chat(harness, stream=True))
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


async def test_the_budget_ends_a_call_with_length(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("hello")
        reply = await chat(harness, max_tokens=3)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("hel", "length")
        assert harness.recorder.ends()[0][1] is Finish.LENGTH


async def test_parameters_reach_the_replica_and_text_does_not(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        asked = {"temperature": 0.5, "seed": 4, "presence_penalty": 0.5}
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        extra = {"top_k": 5, "min_tokens": 2, "stop_token_ids": [9]}
        await chat(harness, **asked, response_format=schema, extra_body=extra)
        sampling = dict(harness.source.calls[0].sampling)
        assert sampling.pop("structured_outputs")["json"] == {"type": "object"}
        own = harness.gateway.table.get(harness.session["session_id"]).seeded(asked)
        assert own["seed"] != 4
        expected = {**own, **extra, "top_p": 1.0, "logprobs": 0, "max_tokens": 8192 - 7}
        assert sampling == expected | {"stream_interval": STREAM_INTERVAL}


async def test_the_samples_of_a_prompt_have_different_noise_for_one_seed_and_ask_the_same(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        for number in ("0", "1", "2", "2"):  # the last one begins the third again
            opened = await harness.open(metadata={"session": number}, sampling={"defaults": {"seed": 7}})
            url = opened["base_url"] + "/chat/completions"
            reply = await harness.http.post(url, json={"messages": [user("hi")]})
            assert reply.status_code == 200
        first, second, third, again = harness.source.calls
        assert len({call.sampling["seed"] for call in (first, second, third)}) == 3
        assert third.sampling["seed"] == again.sampling["seed"]
        assert len({call.asked for call in harness.source.calls}) == 1, "a lost session's replies would not be found"


@pytest.mark.parametrize("thinking", [False, True])
async def test_a_grammar_waits_for_the_end_of_reasoning_only_where_there_is_some(nano: Path, thinking: bool) -> None:
    async with gateway_harness(nano, more_options=("--reasoning-parser", "qwen3")) as harness:
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        extra = {"chat_template_kwargs": {"enable_thinking": thinking}}
        await chat(harness, response_format=schema, extra_body=extra)
        await chat(harness, extra_body=extra)
        constrained, free = (call.sampling for call in harness.source.calls)
        # 0.24 looks for its end in the prompt, where the templates of such models put it, and ours does not
        assert constrained["reasoning_ended"] is (not thinking and VLLM != "0.24")
        parser_kwargs = constrained["reasoning_parser_kwargs"]["chat_template_kwargs"]
        assert parser_kwargs["enable_thinking"] is thinking
        assert not any(name.startswith("reasoning") for name in free)


async def test_one_model_is_described_or_not_found(nano: Path) -> None:
    async with gateway_harness(nano, rules=RequestRules(strict_model=True)) as harness:
        assert (await harness.openai.models.retrieve("nano")).id == "nano"
        for other in ("other", "a/b", "nano/more"):
            with pytest.raises(openai.NotFoundError):
                await harness.openai.models.retrieve(other)
        url = f"{harness.session['base_url']}/models"
        assert (await harness.http.post(f"{url}/nano", json={})).status_code == 405
        assert (await harness.http.get(f"{url}elsewhere")).status_code == 404


async def test_an_item_that_is_no_message_is_refused(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        with pytest.raises(openai.BadRequestError, match="tool_search_call"):
            await harness.openai.responses.create(model="nano", input=[{"type": "tool_search_call", "arguments": None}])
        assert not harness.source.calls


async def test_completions_take_text_and_tokens(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("yes")
        reply = await harness.openai.completions.create(model="nano", prompt="Is it?", logprobs=1)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("yes", "stop")
        assert reply.choices[0].logprobs.token_logprobs == [-0.25] * 4
        assert harness.recorder.ends()[0][2] == {"text": "yes"}
        stream = await harness.openai.completions.create(model="nano", prompt=[72, 73], stream=True)
        assert "".join(chunk.choices[0].text for chunk in await deltas(stream)) == "yes"
        assert list(harness.source.calls[1].prompt_ids) == [72, 73]
        both = await harness.openai.completions.create(model="nano", prompt=["a", "b"])
        assert len(both.choices) == 2
        assert len({call.call_id for call in harness.source.calls}) == 4


async def test_responses_whole_and_streamed(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("fine")
        reply = await harness.openai.responses.create(model="nano", input="how?", instructions="be brief")
        assert reply.output_text == "fine"
        assert harness.prompt().startswith("<|im_start|><|system|>be brief<|im_end|>")
        events = await deltas(await harness.openai.responses.create(model="nano", input="how?", stream=True))
        assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == "fine"
        assert events[-1].type == "response.completed"
        harness.set_replies(TOOL_CALL)
        tool = {"type": "function", **TOOL["function"]}
        reply = await harness.openai.responses.create(model="nano", input="add", tools=[tool])
        (call,) = [item for item in reply.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": 3})


async def test_messages_whole_and_streamed(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("good day")
        reply = await harness.anthropic.messages.create(model="nano", max_tokens=50, system="polite", messages=HI)
        assert (reply.content[0].text, reply.stop_reason, reply.usage.output_tokens) == ("good day", "end_turn", 9)
        async with harness.anthropic.messages.stream(model="nano", max_tokens=50, messages=HI) as stream:
            assert "".join([text async for text in stream.text_stream]) == "good day"
        counted = await harness.anthropic.messages.count_tokens(model="nano", messages=HI)
        assert counted.input_tokens == 7
        assert len(harness.source.calls) == 2


async def test_messages_use_tools_whole_and_streamed(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies(TOOL_CALL)
        function = TOOL["function"]
        tool = {"name": "add", "description": "adds", "input_schema": function["parameters"]}
        asked = {"model": "nano", "max_tokens": 200, "messages": HI, "tools": [tool]}
        reply = await harness.anthropic.messages.create(**asked)
        assert reply.stop_reason == "tool_use"
        assert (reply.content[-1].name, reply.content[-1].input) == ("add", {"a": 2, "b": 3})
        async with harness.anthropic.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        assert (final.stop_reason, final.content[-1].input) == ("tool_use", {"a": 2, "b": 3})


async def test_models_are_listed(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        assert [model.id for model in (await harness.openai.models.list()).data] == ["nano"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_fails_is_an_error_and_on_record(nano: Path, stream: bool) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("hello", finish=Finish.FAILED)
        with pytest.raises(openai.APIError):
            reply = await chat(harness, stream=stream)
            await deltas(reply)
        harness.source.replies = [Reply([104, 105, EOS], error=OSError("the disk is gone"))]
        with pytest.raises(openai.APIError) as broken:
            await deltas(await chat(harness, stream=stream))
        assert "Traceback" not in str(broken.value)
        await harness.drain()
        assert [end[1] for end in harness.recorder.ends()] == [Finish.FAILED] * 2


async def test_two_requests_may_have_one_id(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        header = {"x-request-id": "mine"}
        both = await asyncio.gather(*(chat(harness, extra_headers=header) for _ in range(4)))
        assert [one.id for one in both] == ["chatcmpl-mine"] * 4
        assert len({call.call_id for call in harness.source.calls}) == 4


async def test_a_recorded_conversation_can_be_continued_after_a_restart(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        strange = [256 + 15, *b"yes", EOS]  # its text does not tell of the first id
        harness.source.replies = [Reply(strange)]
        answer = await chat(harness, extra_body={"chat_template_kwargs": {"colour": "red"}})
        call, reply = harness.source.calls[0], harness.recorder.ends()[0][2]
        request = json.loads(json.dumps(call.request))
        index = PrefixIndex()
        index.add_recorded(request, reply, call.prompt_ids, tokens(strange))
        harness.gateway.table.get(harness.session["session_id"]).prefixes = index
        messages = [*HI, {"role": "assistant", "content": answer.choices[0].message.content}, user("more")]
        await chat(harness, messages=messages, extra_body={"chat_template_kwargs": {"colour": "red"}})
        recorded = [*call.prompt_ids, *strange]
        assert list(harness.source.calls[1].prompt_ids)[: len(recorded)] == recorded
