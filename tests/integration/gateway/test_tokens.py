"""Tokens in are tokens out: a continued conversation begins with its recorded ids, whatever its text tokenizes to."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.gateway import EOS, TOOL, TOOL_CALL, GatewayHarness, Reply, assistant, gateway_harness, tokenizer, user

from seamless_verl.gateway.continuation import Continuation
from seamless_verl.trajectory.records import tokens

pytestmark = pytest.mark.integration
STRANGE = [256 + 15, *b"he", 256 + 16, *b"llo", EOS]
"""Reads `hello`, and is not how the tokenizer would write it: ids 271 and 272 are left out when decoding."""


def recorded(harness: GatewayHarness, number: int) -> list[int]:
    call = harness.source.calls[number]
    return [*call.prompt_ids, *harness.recorder.ids(call.call_id)]


def check_continued(harness: GatewayHarness, new: str) -> None:
    """The last prompt is the first turn's ids verbatim, and then `new`."""
    before, prompt = recorded(harness, 0), list(harness.source.calls[-1].prompt_ids)
    assert prompt[: len(before)] == before
    assert harness.tokenizer.decode(prompt[len(before) :]) == new


NEXT = "<|im_start|><|user|>more<|im_end|><|im_start|><|assistant|>"


async def test_chat_continues_over_unusual_tokens(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.source.replies = [Reply(STRANGE)]
        reply = await harness.openai.chat.completions.create(model="nano", messages=[user("hi")])
        text = reply.choices[0].message.content
        assert text == "hello" and [*harness.ids(text), EOS] != STRANGE
        messages = [user("hi"), assistant(text), user("more")]
        await harness.openai.chat.completions.create(model="nano", messages=messages)
        check_continued(harness, NEXT)
        whole = harness.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert harness.prompt() == whole.replace("hello", harness.tokenizer.decode(STRANGE[:-1]))


async def test_responses_and_messages_do_too(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.source.replies = [Reply(STRANGE)]
        reply = await harness.openai.responses.create(model="nano", input="hi")
        again: Any = [user("hi"), *[item.model_dump() for item in reply.output], user("more")]
        await harness.openai.responses.create(model="nano", input=again)
        check_continued(harness, NEXT)
        harness.source.calls.clear()
        ask = {"model": "nano", "max_tokens": 100, "system": "s"}
        message = await harness.anthropic.messages.create(messages=[user("hi")], **ask)
        blocks = [block.model_dump(exclude_none=True) for block in message.content]
        await harness.anthropic.messages.create(messages=[user("hi"), assistant(blocks), user("more")], **ask)
        check_continued(harness, NEXT)


async def test_a_response_that_may_be_truncated_continues_as_long_as_it_fits(nano: Path) -> None:
    async with gateway_harness(nano, ("--max-model-len", "256")) as harness:
        harness.source.replies = [Reply(STRANGE)]
        create = partial(harness.openai.responses.create, model="nano", truncation="auto", max_output_tokens=16)
        reply = await create(input="hi")
        sent: Any = [user("hi"), *[item.model_dump() for item in reply.output], user("more")]
        await create(input=sent)
        check_continued(harness, NEXT)
        await create(input=[*sent, assistant("hello"), user("x" * 300)])
        assert len(harness.source.calls[-1].prompt_ids) < 256, "its beginning was cut off"


async def test_agents_that_speak_in_turn_are_continued(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.source.replies = [Reply(STRANGE)]
        create = partial(harness.openai.chat.completions.create, model="nano")
        before = [user("hi"), assistant("the first agent's")]
        await create(messages=before)
        await create(messages=[*before, assistant("hello"), user("more")])
        check_continued(harness, NEXT)


async def test_a_message_that_the_agent_began_is_continued(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.source.replies = [Reply(STRANGE)]
        create = partial(harness.openai.chat.completions.create, model="nano")
        begun = {"add_generation_prompt": False, "continue_final_message": True}
        await create(messages=[user("hi"), assistant("I say: ")], extra_body=begun)
        for said in ("I say: hello", "I say:hello"):
            await create(messages=[user("hi"), assistant(said), user("more")])
        before, (exact, other) = recorded(harness, 0), (list(call.prompt_ids) for call in harness.source.calls[1:])
        assert exact[: len(before)] == before and harness.tokenizer.decode(exact[len(before) :]) == NEXT
        assert other[: len(before)] != before, "the white space between two texts was said"


async def test_parts_of_text_are_the_text_that_they_make(nano: Path, tmp_path: Path) -> None:
    """Where the chat template takes texts alone, for which vLLM joins the parts."""
    own = (nano / "model" / "chat_template.jinja").read_text()
    (tmp_path / "template.jinja").write_text(own.replace("for part in content", "for part in []"))
    async with gateway_harness(nano, ("--chat-template", str(tmp_path / "template.jinja"))) as harness:
        harness.source.replies = [Reply(STRANGE)]
        create = partial(harness.openai.chat.completions.create, model="nano")
        parts: Any = [{"type": "text", "text": text} for text in ("hi", "you")]
        await create(messages=[{"role": "user", "content": parts}])
        await create(messages=[user("hi\nyou"), assistant("hello"), user("more")])
        check_continued(harness, NEXT)


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_continued_with_their_results(nano: Path, stream: bool) -> None:
    async with gateway_harness(nano) as harness:
        written = TOOL_CALL.replace(" ", "  ")  # JSON the agent will send back written otherwise
        harness.set_replies("I add. " + written, "5")
        asked = {"model": "nano", "tools": [TOOL]}
        if stream:
            async with harness.openai.chat.completions.stream(messages=[user("2+3")], **asked) as chunks:
                reply = (await chunks.get_final_completion()).choices[0].message
        else:
            reply = (await harness.openai.chat.completions.create(messages=[user("2+3")], **asked)).choices[0].message
        back = {"role": "assistant", "content": reply.content, "tool_calls": [_sent(one) for one in reply.tool_calls]}
        result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "5"}
        await harness.openai.chat.completions.create(messages=[user("2+3"), back, result], **asked)
        check_continued(
            harness, "<|im_start|><|tool|><tool_response>5</tool_response><|im_end|><|im_start|><|assistant|>"
        )
        assert written in harness.prompt()


def _sent(call: Any) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": "add", "arguments": call.function.arguments}}


async def test_a_reply_cut_by_its_budget_is_closed_as_the_template_does(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("hello")
        await harness.openai.chat.completions.create(model="nano", messages=[user("hi")], max_tokens=2)
        messages = [user("hi"), assistant("he"), user("more")]
        await harness.openai.chat.completions.create(model="nano", messages=messages)
        check_continued(harness, "<|im_end|>" + NEXT)


async def test_many_turns_grow_by_what_is_new(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.source.replies = [Reply(STRANGE)]
        messages: list[Any] = [user("hi")]
        for turn in range(5):
            reply = await harness.openai.chat.completions.create(model="nano", messages=messages)
            messages += [assistant(reply.choices[0].message.content), user(f"more {turn}")]
        whole = recorded(harness, -1)
        for number in range(4):
            before = recorded(harness, number)
            assert whole[: len(before)] == before
        session = harness.gateway.table.get(harness.session["session_id"])
        kept = sum(len(prefix.tail) for prefix in session.prefixes._prefixes.values())
        assert kept == len(whole)  # each id once


@pytest.mark.parametrize(
    "changed",
    [
        {"messages": [user("ho"), assistant("hello"), user("more")]},
        {"messages": [user("hi"), assistant("hullo"), user("more")]},
        {"tools": [TOOL]},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"extra_body": {"truncate_prompt_tokens": 20}},
    ],
)
async def test_another_conversation_is_rendered_whole(nano: Path, changed: dict[str, Any]) -> None:
    async with gateway_harness(nano) as harness:
        harness.source.replies = [Reply(STRANGE)]
        await harness.openai.chat.completions.create(model="nano", messages=[user("hi")])
        asked = {"messages": [user("hi"), assistant("hello"), user("more")], **changed}
        await harness.openai.chat.completions.create(model="nano", **asked)
        assert 271 not in harness.source.calls[1].prompt_ids


async def test_sessions_do_not_share_conversations(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.source.replies = [Reply(STRANGE)]
        await harness.openai.chat.completions.create(model="nano", messages=[user("hi")])
        other = await harness.open()
        body = {"model": "nano", "messages": [user("hi"), assistant("hello"), user("more")]}
        reply = await harness.http.post(f"{other['base_url']}/chat/completions", json=body)
        assert reply.status_code == 200
        assert 271 not in harness.source.calls[1].prompt_ids


QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUMBERED = "{{ messages | length }}" + QWEN
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + QWEN


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("template", [None, QWEN])
@pytest.mark.parametrize("family", ["qwen3", "something_else"])
def test_the_continuation_equals_the_rendering_of_the_whole(
    nano: Path, template: str | None, family: str, cut: bool
) -> None:
    own = tokenizer(nano / "model")
    given = {} if template is None else {"chat_template": template}
    messages = [user("hi"), assistant("hello"), user("more"), assistant("yes"), user("and?")]
    head = own.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True, **given)
    whole = own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given)
    before = [*own.encode(head, add_special_tokens=False), *b"hello", *([] if cut else [EOS])]
    joined = Continuation(own, family, template).extend(tokens(before), messages, 2, None, {})
    assert joined == own.encode(whole, add_special_tokens=False)


@pytest.mark.parametrize("template", [NUMBERED, STRICT])
def test_a_template_whose_turns_cannot_be_joined_is_not_continued(nano: Path, template: str) -> None:
    own = Continuation(tokenizer(nano / "model"), "qwen3", template)
    messages = [user("hi"), assistant("hello"), user("more")]
    assert own.extend(tokens([*b"hello", EOS]), messages, 2, None, {}) is None
