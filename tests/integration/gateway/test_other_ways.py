"""Conversations that agents send back in other ways than they got them: the session keeps its recorded ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.gateway import TOOL, TOOL_CALL, GatewayHarness, assistant, gateway_harness, user
from support.gateway_restart import generated_ids, open_session, run_gateway
from support.trajectory import session, turn
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from seamless_verl.gateway.continuation import Continuation
from seamless_verl.gateway.prefix_index import PrefixIndex, prefix_seed
from seamless_verl.journal import SqliteJournal
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.records import tokens
from seamless_verl.trajectory.sequences import Assembly, assemble

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


def reference(item: Any) -> dict[str, str]:
    return {"type": "item_reference", "id": item.id}


@pytest.mark.parametrize("stream", [False, True])
async def test_items_that_are_named_stand_for_what_was_said(nano: Path, stream: bool) -> None:
    async with gateway_harness(nano) as harness:
        asked: dict[str, Any] = {"model": "nano", "tools": [{"type": "function", **FUNCTION}]}

        async def respond(own: list[Any]) -> Any:
            if not stream:
                return await harness.openai.responses.create(input=own, **asked)
            events = [event async for event in await harness.openai.responses.create(input=own, stream=True, **asked)]
            named = {event.item_id for event in events if hasattr(event, "item_id")}
            given = {event.item.id for event in events if event.type == "response.output_item.added"}
            assert named <= given == {item.id for item in events[-1].response.output}
            return events[-1].response

        harness.set_replies(f"I add. {TOOL_CALL}\n{OTHER_CALL}", "done")
        first = await respond([user("add")])
        assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
        number = first.id.removeprefix("resp_")
        assert [item.id for item in first.output] == [f"msg_{number}_0", f"fc_{number}_0", f"fc_{number}_1"]
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": text}
            for item, text in zip(first.output[1:], ("5", "9"), strict=True)
        ]
        own: list[Any] = [user("add"), *map(reference, first.output), *results]
        second = await respond(own)
        check_continued(harness, RESULTS)
        await respond([*own, *map(reference, second.output), user("more")])
        before, prompt = recorded(harness, 1), list(harness.source.calls[-1].prompt_ids)
        assert prompt[: len(before)] == before


async def test_a_named_item_that_is_unknown_is_refused(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        client = harness.openai.responses
        unstored = await client.create(model="m", input="hi", store=False)
        for name in (unstored.output[0].id, "msg_0"):
            with pytest.raises(openai.BadRequestError, match=f"Item with id '{name}' not found") as refused:
                await client.create(model="m", input=[{"type": "item_reference", "id": str(name)}])
            assert refused.value.param == "input"


async def test_named_items_are_known_after_a_restart(nano: Path, tmp_path: Path) -> None:
    path = "/v1/responses"
    async with httpx.AsyncClient(timeout=30) as http:
        with SqliteJournal(tmp_path / "journal.sqlite") as journal:
            async with run_gateway(nano / "model", journal) as first:
                session = await open_session(http, first.gateway.url)
                body: dict[str, Any] = {"model": "nano", "input": [user("hi")], "max_output_tokens": 20}
                reply = (await http.post(f"{first.gateway.url}/s/{session['key']}{path}", json=body)).json()
                (item,) = reply["output"]
            async with run_gateway(nano / "model", journal) as again:
                url = f"{again.gateway.url}/s/{session['key']}{path}"
                kept = (await http.get(f"{url}/{reply['id']}")).json()["output"]
                assert [(one["id"], one["content"][0]["text"]) for one in kept] == [
                    (item["id"], item["content"][0]["text"])
                ]
                body["input"] = [user("hi"), {"type": "item_reference", "id": item["id"]}, user("more")]
                assert (await http.post(url, json=body)).status_code == 200
                record = journal.read(session["session_id"])
                assert record is not None
                one, two = record.calls
                known = [*one.prompt_ids, *generated_ids(one)]
                assert two.prompt_ids.tolist()[: len(known)] == known


CODE, STOP = ("I add.\n<code>\n2 + 3\n", "Now\n<code>\nanswer(5)\n"), "</code>"
DONE = "\nCalling tools:\n[{'name': 'python'}]"


async def ask_chat(harness: GatewayHarness, messages: Any) -> str:
    asked = await harness.openai.chat.completions.create(model="nano", messages=messages, stop=[STOP])
    return asked.choices[0].message.content or ""


async def ask_message(harness: GatewayHarness, messages: Any) -> str:
    asked: dict[str, Any] = {"model": "nano", "max_tokens": 200, "stop_sequences": [STOP]}
    reply = await harness.anthropic.messages.create(messages=messages, **asked)
    return "".join(block.text for block in reply.content if block.type == "text")


async def ask_response(harness: GatewayHarness, messages: Any) -> str:
    reply = await harness.openai.responses.create(model="nano", input=messages, extra_body={"stop": [STOP]})
    return reply.output_text


async def run_code_agent(harness: GatewayHarness, ask: Any) -> Assembly:
    """Three calls of an agent that puts a stop string back into the message, and its call as text behind it."""
    messages: list[Any] = [user("2 + 3?")]
    for _ in range(3):
        said = await ask(harness, messages)
        messages += [assistant((said + STOP).strip() + DONE), user("Observation:\n5")]
    calls = harness.source.calls
    turns = [turn(call.call_id, call.prompt_ids.tolist(), harness.recorder.ids(call.call_id)) for call in calls]
    return assemble(session(*turns), TrainAll(), 0)


@pytest.mark.parametrize("ask", [ask_chat, ask_message, ask_response])
async def test_an_agent_that_puts_stop_strings_back_is_one_sequence(nano: Path, ask: Any) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies(*(f"\n{code}{STOP} and more" for code in CODE), "five", size=3)
        assembly = await run_code_agent(harness, ask)
        (sequence,) = assembly.sequences
        assert assembly.account.generated == sequence.trained == sum(len(code) + 1 + len(STOP) for code in CODE) + 5
        observed = "<|im_end|><|im_start|><|user|>Observation:\n5<|im_end|><|im_start|><|assistant|>"
        steps = "".join(f"\n{code}{STOP}{DONE}{observed}" for code in CODE)
        assert harness.tokenizer.decode(sequence.response_ids) == f"{steps}five<|im_end|>"
        whole = harness.tokenizer.apply_chat_template(
            list(harness.source.calls[-1].request["messages"]), tokenize=False, add_generation_prompt=True
        )
        assert harness.prompt().replace("<|assistant|>\n", "<|assistant|>") == whole, "but for white space that was cut"


PIECES = ("<end>", "<t>", "</t>\n", "go", " and", "</cod", "e>", "e>\n", "e>,", "\n")
ENDED = ("go", "</cod", "e>")


def pieces_tokenizer() -> Any:
    """A tokenizer of `PIECES`, and of single characters for any other text; the first piece ends a turn."""
    letters = sorted({letter for piece in PIECES for letter in piece} | set("arunX "))
    vocabulary = {piece: number for number, piece in enumerate([*PIECES, *(set(letters) - set(PIECES))])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=PIECES[0], clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    ("said", "generated", "sent", "kept", "rest"),
    [
        ("go", ENDED, "go</code>\nrun", 3, "\nrun"),
        ("go", ("go", "</cod", "e>\n"), "go</code>\nrun", 3, "run"),
        ("go", ("go", "</cod", "e>\n"), "go</code>run", 3, "run"),  # generated white space stays
        ("go", ("go", "</cod", "e>\n"), "go</code>", 3, ""),
        ("go", ("go", "</cod", "e>,"), "go</code>run", 2, "e>run"),  # the stop string ends within a token
        ("go", ENDED, "go, run", 1, ", run"),  # it was not put back
        ("go", ("go", "<end>"), "go</code>run", 1, "</code>run"),
        ("go", ("\n", *ENDED), "go</code>run", 4, "run"),  # the agent trims
        ({"content": "go", "reasoning": "go and"}, ("<t>", "go", " and", "</t>\n", *ENDED), "go</code>run", 7, "run"),
        ("go", ("go", "</cod", "go", "e>"), "go</cod and", None, ""),  # which `go` the reply is is not certain
    ],
)
def test_the_ids_that_say_what_was_sent_back_are_kept(
    said: Any, generated: tuple[str, ...], sent: str, kept: int | None, rest: str
) -> None:
    tokenizer, index, seed = pieces_tokenizer(), PrefixIndex(), prefix_seed(None, {})
    ids = tokenizer.convert_tokens_to_ids(list(generated))
    reply = {"role": "assistant", **(said if isinstance(said, dict) else {"content": said})}
    index.add(seed, [user("q")], reply, tokens([7]), tokens(ids))
    extended = index.find_extended(seed, [user("q"), assistant(sent), user("more")], 0)
    assert extended is not None
    match = Continuation(tokenizer, "").rejoin(extended)
    if kept is None:
        assert match is None
    else:
        assert match is not None and match.count == 2
        assert match.prefix.ids().tolist() == [7, *ids[:kept]] and tokenizer.decode(list(match.rest)) == rest
