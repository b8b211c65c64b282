"""The same request to both servers: one status, and one reply but for what is listed here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import httpx
import pytest
from support.conformance_server import GATEWAY, MODEL, UID, VLLM, Servers
from support.conformance_words import CALL, ENDS, HI, LONG, NO_BLANKS, PARAMETERS, TALE, TOOL, says, thinks_then_says

from seamless_verl.gateway.session import seed_in

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.serial]
CHAT, PLAIN, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COUNT = "/v1/messages/count_tokens"
PLACE = f"{UID}_0"  # of which the gateway makes the engine's seed; vLLM's own server is given that one
GREEDY, SEEDED = {"temperature": 0, "max_tokens": 12}, {"seed": 7, "max_tokens": 12, **LONG}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
USE = {"name": "measure", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
SAID = {"output_config": {"format": {"type": "json_schema", "schema": {"const": "hello"}}}, "max_tokens": 20}
LENGTHY = "a" * 300  # more than a block of the prefix cache

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": TALE, **GREEDY}),
    "chat seeded": (CHAT, {"messages": TALE, **SEEDED}),
    "chat streamed": (CHAT, {"messages": TALE, **SEEDED, **USAGE}),
    "chat of choices": (CHAT, {"messages": TALE, **SEEDED, "n": 3}),
    "chat of choices streamed": (CHAT, {"messages": TALE, **SEEDED, **USAGE, "n": 3}),
    "chat with logprobs": (CHAT, {"messages": TALE, **SEEDED, "logprobs": True, "top_logprobs": 3}),
    "chat with logprobs streamed": (CHAT, {"messages": TALE, **USAGE, "logprobs": True, **says("hello")}),
    "chat with penalties": (CHAT, {"messages": TALE, **SEEDED, "presence_penalty": 1, "frequency_penalty": 1}),
    "chat with sampling": (CHAT, {"messages": TALE, **SEEDED, "top_p": 0.5, "top_k": 9, "min_p": 0.01}),
    "chat with token ids": (CHAT, {"messages": TALE, **SEEDED, "return_token_ids": True}),
    "chat stopped": (CHAT, {"messages": TALE, "stop": ["the"], **says("hello there")}),
    "chat stopped, told": (
        CHAT,
        {"messages": TALE, "stop": ["the"], "include_stop_str_in_output": True, **says("the")},
    ),
    "chat stopped by token": (CHAT, {"messages": TALE, "stop_token_ids": [ord("f")], **GREEDY}),
    "chat of bad words": (CHAT, {"messages": TALE, **GREEDY, "bad_words": ["a", "f", "p"]}),
    "chat of few tokens": (CHAT, {"messages": TALE, **SEEDED, "allowed_token_ids": [97, 98]}),
    "chat at least": (CHAT, {"messages": HI, "temperature": 0, "max_tokens": 12, "min_tokens": 12}),
    "chat goes on": (CHAT, {"messages": [*HI, {"role": "assistant", "content": "hello"}, *HI], **GREEDY}),
    "chat continued": (
        CHAT,
        {
            "messages": [*HI, {"role": "assistant", "content": "hello"}],
            **GREEDY,
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    "chat echoed": (CHAT, {"messages": HI, **GREEDY, "echo": True}),
    "chat with regex": (CHAT, {"messages": HI, **SEEDED, "structured_outputs": {"regex": "[ab]{3}"}}),
    "chat with schema": (
        CHAT,
        {
            "messages": HI,
            "temperature": 0,
            "logit_bias": NO_BLANKS,
            "response_format": {"type": "json_schema", "json_schema": {"name": "m", "schema": PARAMETERS}},
        },
    ),
    "chat with reasoning": (CHAT, {"messages": HI, "seed": 3, "max_tokens": 200, **thinks_then_says("four")}),
    "chat with reasoning streamed": (
        CHAT,
        {"messages": HI, "seed": 3, "max_tokens": 200, **USAGE, **thinks_then_says("four")},
    ),
    "chat without its reasoning": (
        CHAT,
        {"messages": HI, "seed": 3, "max_tokens": 40, "include_reasoning": False, **thinks_then_says("four")},
    ),
    "tool required": (
        CHAT,
        {"messages": HI, "temperature": 0, "tools": [TOOL], "tool_choice": "required", "logit_bias": ENDS},
    ),
    "tool required streamed": (
        CHAT,
        {"messages": HI, "temperature": 0, "tools": [TOOL], "tool_choice": "required", "logit_bias": ENDS, **USAGE},
    ),
    "tool found": (CHAT, {"messages": HI, "tools": [TOOL], "temperature": 0, **says("so " + CALL)}),
    "tool found streamed": (CHAT, {"messages": HI, "tools": [TOOL], "temperature": 0, **USAGE, **says("so " + CALL)}),
    "chat of another model": (CHAT, {"messages": HI, "model": "other"}),
    "chat without messages": (CHAT, {}),
    "chat too long": (CHAT, {"messages": [{"role": "user", "content": "x" * 1100}]}),
    "chat too long streamed": (CHAT, {"messages": [{"role": "user", "content": "x" * 1100}], "stream": True}),
    "chat too hot": (CHAT, {"messages": HI, "temperature": "hot"}),
    "chat of bad top_p": (CHAT, {"messages": HI, "top_p": 2}),
    "chat of a bad regex": (CHAT, {"messages": HI, "structured_outputs": {"regex": "[a"}}),
    "chat of a bad grammar": (CHAT, {"messages": HI, "structured_outputs": {"grammar": "no ::= grammar"}}),
    "chat of a bad grammar streamed": (
        CHAT,
        {"messages": HI, "stream": True, "structured_outputs": {"grammar": "no ::= grammar"}},
    ),
    "chat first": (CHAT, {"messages": HI, **GREEDY, "priority": 3}),
    "chat of prompt logprobs": (CHAT, {"messages": HI, **GREEDY, "prompt_logprobs": 1}),
    "chat of beams": (CHAT, {"messages": HI, "max_tokens": 2, "n": 2, "use_beam_search": True}),
    "completion": (PLAIN, {"prompt": "hi", **GREEDY, "logprobs": 2}),
    "completion seeded": (PLAIN, {"prompt": ["hi", "ho"], **SEEDED, "n": 2}),
    "completion streamed": (PLAIN, {"prompt": "hi", **SEEDED, **USAGE}),
    "completion echoed": (PLAIN, {"prompt": "hi", **SEEDED, "echo": True}),
    "completion of a tail": (PLAIN, {"prompt": "x" * 40, **SEEDED, "truncate_prompt_tokens": 4}),
    "completion of nothing": (PLAIN, {"prompt": "hi", "max_tokens": 0}),
    "completion with suffix": (PLAIN, {"prompt": "hi", "suffix": "ho"}),
    "completion too long": (PLAIN, {"prompt": "x" * 1100}),
    "completion of no token": (PLAIN, {"prompt": [100_000]}),
    "response": (RESPONSES, {"input": "hi", "temperature": 0, "max_output_tokens": 12}),
    "response of much read": (RESPONSES, {"input": LENGTHY, "temperature": 0, "max_output_tokens": 2}),
    "response streamed": (RESPONSES, {"input": "hi", "stream": True, **says("hello")}),
    "response incomplete": (RESPONSES, {"input": "hi", "seed": 7, "max_output_tokens": 3, **LONG}),
    "response after another": (RESPONSES, {"input": "hi", "previous_response_id": "resp_0"}),
    "response in the background": (RESPONSES, {"input": "hi", "background": True}),
    "response of a strange item": (RESPONSES, {"input": [{"type": "tool_search_call", "arguments": None}]}),
    "message": (MESSAGES, {"messages": HI, **SAID}),
    "message of much read": (MESSAGES, {"messages": [{"role": "user", "content": LENGTHY}], **SAID}),
    "message streamed": (MESSAGES, {"messages": HI, "stream": True, **SAID}),
    "message cut": (MESSAGES, {"messages": TALE, "temperature": 0, "max_tokens": 3}),
    "message stopped": (MESSAGES, {"messages": HI, **SAID, "stop_sequences": ["lo"]}),
    "message with tool": (
        MESSAGES,
        {
            "messages": HI,
            "tools": [USE],
            "tool_choice": {"type": "tool", "name": "measure"},
            "temperature": 0,
            "max_tokens": 200,
        },
    ),
    "message without budget": (MESSAGES, {"messages": HI}),
    "message of another model": (MESSAGES, {"messages": HI, "max_tokens": 3, "model": "other"}),
    "message too long": (MESSAGES, {"messages": [{"role": "user", "content": "x" * 1100}], "max_tokens": 3}),
    "counted": (COUNT, {"messages": TALE, "system": "be brief"}),
}
UNCOUNTED = "replicas do not tell how much of a prompt their caches held"
UNSCORED = "replicas do not score prompts"
SHAPED = "vLLM's own errors of this kind do not have the API's shape; the gateway gives them one"
REFUSED = ("error.code", "error.message", "error.param", "error.type")
OVERFLOWN = "the gateway says it as the real service does, for clients that look for its words"
WORDED = "the gateway says why it does not take it"
DIFFERENT: dict[str, dict[str, str]] = {
    "chat echoed": {"*": UNSCORED + ", and vLLM scores a chat that is echoed"},
    "chat of prompt logprobs": {"*": UNSCORED},
    "chat of beams": {"*": "beam search tries tokens that no reply contains, and that no record could tell of"},
    "response of much read": {"usage.input_tokens_details.cached_tokens": UNCOUNTED},
    "response in the background": {"error.code": WORDED, "error.message": WORDED},
    "response of a strange item": {
        name: "vLLM's serving class breaks at an item that its template cannot render; the gateway refuses it"
        for name in ("status", *REFUSED)
    },
    "chat too long": {name: OVERFLOWN for name in ("error.code", "error.message", "error.param", "error.type")},
    "chat too long streamed": {
        name: OVERFLOWN for name in ("error.code", "error.message", "error.param", "error.type")
    },
    "completion too long": {name: OVERFLOWN for name in ("error.code", "error.message", "error.param", "error.type")},
    "response after another": {
        name: "the gateway says it as the real service does" for name in ("status", *REFUSED) if name != "error.type"
    },
    "response streamed": {
        "response.completed:response.output.-.summary": "the gateway's last event has the items that were streamed"
    },
    "tool required streamed": {
        "*.delta.tool_calls.-.function.arguments": "the gateway streams the arguments as a whole reply has them"
    },
    "message with tool": {"stop_reason": "vLLM ends a call that was asked for by name as in chat completions"},
    "message without budget": {
        **dict.fromkeys(("type", "error.type"), SHAPED),
        **dict.fromkeys(("error.code", "error.param"), SHAPED),
    },
    "message of another model": {"error.type": SHAPED},
    "message too long": {"error.type": SHAPED, "error.message": OVERFLOWN},
}
"""By request, the fields that differ and why; `*` for any."""

OWN = {"id", "created", "created_at", "system_fingerprint", "call_id", "item_id", "sequence_number"}
MERGED = ".reasoning_tokens"  # vLLM counts them delta by delta of a stream, and merges those that wait to be sent
SPELLED = {"content", "text", "delta", "arguments", "partial_json", "reasoning", "thinking"}


def leaves(value: Any, path: str = "", *, numbered: bool = True) -> Iterator[tuple[str, Any]]:
    """Each value in a reply with its path, less what is a reply's own."""
    if isinstance(value, dict):
        for name, held in value.items():
            if name not in OWN:
                yield from leaves(held, f"{path}.{name}".lstrip("."), numbered=numbered)
    elif isinstance(value, list) and value:
        for number, held in enumerate(value):
            yield from leaves(held, f"{path}.{number if numbered else '-'}", numbered=numbered)
    else:
        yield path, value


def events(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def told(reply: httpx.Response) -> dict[str, Any]:
    """A reply by paths. Of a stream: its texts as they add up, and each other field's values as they change."""
    fields: dict[str, Any] = {"status": reply.status_code, "content-type": reply.headers.get("content-type")}
    if "event-stream" not in str(fields["content-type"]):
        return fields | dict(leaves(reply.json()))
    for event in events(reply.text):
        choices = event.get("choices") or [{}]
        speaker = f"{event.get('type', '')}{choices[0].get('index', '')}:"
        for path, value in leaves(event, numbered=False):
            if path.endswith(MERGED):
                continue
            whole = fields.setdefault(speaker + path, "" if path.rpartition(".")[2] in SPELLED else [])
            if isinstance(whole, str):
                fields[speaker + path] = whole + (value if isinstance(value, str) else "")
            elif not whole or whole[-1] != value:
                whole.append(value)
    return fields


def different(servers: Servers, asked: tuple[str, dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    path, body = asked
    theirs_body = body | ({"seed": seed_in(PLACE, body["seed"])} if "seed" in body else {})
    ours, theirs = (
        told(servers.server(name).post(path, json={"model": MODEL, **given}))
        for name, given in ((GATEWAY, body), (VLLM, theirs_body))
    )
    missing = "nothing"
    return {
        name: (ours.get(name, missing), theirs.get(name, missing))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name, missing) != theirs.get(name, missing)
    }


@pytest.mark.parametrize("what", ASKED)
def test_both_reply_the_same(servers: Servers, what: str) -> None:
    found, known = different(servers, ASKED[what]), DIFFERENT.get(what, {})
    unlisted = {name: pair for name, pair in found.items() if not any(fnmatchcase(name, one) for one in known)}
    assert not unlisted, unlisted
    gone = [one for one in known if not any(fnmatchcase(name, one) for name in found)]
    assert not gone, f"these do not differ any more: {gone}"


def test_what_is_listed_is_asked() -> None:
    assert set(DIFFERENT) <= set(ASKED) and all(why for fields in DIFFERENT.values() for why in fields.values())
