"""Requests as agents really send them: any model name, hosted tools, long prompts, stored responses, and attacks."""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.gateway import TOOL, TOOL_CALL, GatewayHarness, gateway_harness, user

from seamless_verl.gateway.request_rules import RequestRules
from seamless_verl.platform.vllm_versions import TAKES_NAMESPACES

pytestmark = pytest.mark.integration
CHAT, PLAIN, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI = [user("hi")]
LIMIT = 256
SHORT = ("--max-model-len", str(LIMIT))
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "nano", "messages": HI},
    PLAIN: {"model": "nano", "prompt": "hi"},
    RESPONSES: {"model": "nano", "input": "hi"},
    MESSAGES: {"model": "nano", "messages": HI, "max_tokens": 9},
}
FUNCTION: Any = TOOL["function"]
ANTHROPIC_TOOL = {"name": "add", "input_schema": FUNCTION["parameters"]}


async def post(harness: GatewayHarness, path: str, body: Any, **options: Any) -> httpx.Response:
    url = harness.session["anthropic_base_url"] + path
    return await harness.http.post(
        url, **({"json": body} if not isinstance(body, bytes) else {"content": body}), **options
    )


def error_of(reply: httpx.Response, path: str) -> dict[str, Any]:
    body = reply.json()
    assert "Traceback" not in reply.text
    if path.startswith(MESSAGES):
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def refused(harness: GatewayHarness) -> list[tuple[str, int]]:
    """Path and status of each refused request on record."""
    return [event[2:4] for event in harness.recorder.events if event[0] == "refused"]


async def test_any_model_name_is_taken_and_given_back(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        for path, body in BODIES.items():
            for name in ("claude-opus-4-8", "gpt-5-codex", "org/model:tag"):
                reply = await post(harness, path, {**body, "model": name})
                assert reply.status_code == 200 and reply.json()["model"] == name
                streamed = await post(harness, path, {**body, "model": name, "stream": True})
                assert f'"model":"{name}"' in streamed.text.replace('": "', '":"')
            if path != MESSAGES:
                unnamed = {field: value for field, value in body.items() if field != "model"}
                assert (await post(harness, path, unnamed)).json()["model"] == "nano"


async def test_a_setting_makes_names_strict(nano: Path) -> None:
    async with gateway_harness(nano, rules=RequestRules(strict_model=True)) as harness:
        for path, body in BODIES.items():
            reply = await post(harness, path, {**body, "model": "other"})
            assert reply.status_code == 404 and "other" in error_of(reply, path)["message"]
            assert (await post(harness, path, body)).status_code == 200
        assert refused(harness) == [(path, 404) for path in BODIES]
        with pytest.raises(openai.NotFoundError):
            await harness.openai.models.retrieve("other")
        with pytest.raises(anthropic.NotFoundError):
            await harness.anthropic.models.retrieve("other")


async def test_models_have_the_shape_of_the_api_that_asks(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        theirs = await harness.anthropic.models.list()
        assert [(model.type, model.id) for model in theirs.data] == [("model", "nano")] and not theirs.has_more
        assert (await harness.anthropic.models.retrieve("claude-x")).id == "claude-x"
        ours = await harness.openai.models.list()
        assert [(model.object, model.id) for model in ours.data] == [("model", "nano")]
        assert (await harness.openai.models.retrieve("a/b")).id == "a/b"
        assert ours.data[0].model_extra["max_model_len"] > 0


async def test_more_output_than_there_is_room_for_is_clamped(nano: Path) -> None:
    names = {CHAT: ("max_tokens", "max_completion_tokens"), RESPONSES: ("max_output_tokens",)}
    async with gateway_harness(nano, SHORT) as harness:
        for path in BODIES:
            for name, asked in product(
                names.get(path, ("max_tokens",)), (LIMIT - 1, LIMIT, LIMIT + 1, 32_000, 1 << 70)
            ):
                reply = await post(harness, path, {**BODIES[path], name: asked})
                assert reply.status_code == 200, reply.text
                call = harness.source.calls[-1]
                assert call.sampling["max_tokens"] == LIMIT - len(call.prompt_ids)


def long_body(path: str, characters: int, **more: Any) -> dict[str, Any]:
    text = "x" * characters
    asked = {"prompt": text} if path == PLAIN else {"input": text} if path == RESPONSES else {"messages": [user(text)]}
    return {**BODIES[path], **asked, **more}


def framing(path: str) -> int:
    """Tokens of a prompt besides its text, which has a token a character."""
    return 0 if path == PLAIN else 5


def check_too_long(reply: httpx.Response, path: str, tokens: int, stream: bool) -> None:
    if path == RESPONSES and stream:
        assert reply.status_code == 200 and "text/event-stream" in reply.headers["content-type"]
        last = json.loads(reply.text.strip().rpartition("data: ")[2])
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "context_length_exceeded"
        return
    assert reply.status_code == 400
    error = error_of(reply, path)
    assert error["type"] == "invalid_request_error"
    if path == MESSAGES and tokens > LIMIT:
        assert error["message"] == f"prompt is too long: {tokens} tokens > {LIMIT} maximum"
    elif path == MESSAGES:
        expected = f"input length and `max_tokens` exceed context limit: {tokens} + 9 > {LIMIT}"
        assert error["message"].startswith(expected)
    else:
        assert error["code"] == "context_length_exceeded"
        assert path == RESPONSES or f"maximum context length is {LIMIT} tokens" in error["message"]


async def test_a_prompt_that_is_too_long_is_said_as_the_api_says_it(nano: Path) -> None:
    async with gateway_harness(nano, SHORT) as harness:
        for path, stream in product(BODIES, (False, True)):
            harness.source.calls.clear()
            harness.recorder.events.clear()
            for tokens in (LIMIT, LIMIT + 1, 3 * LIMIT):
                reply = await post(harness, path, long_body(path, tokens - framing(path), stream=stream))
                check_too_long(reply, path, tokens, stream)
            assert not harness.source.calls
            assert refused(harness) == [(path, 400)] * 3
            reply = await post(harness, path, long_body(path, LIMIT - 1 - framing(path)))
            assert reply.status_code == 200 and harness.source.calls[-1].sampling["max_tokens"] == 1


async def test_a_conversation_that_grows_too_long_is_said_too(nano: Path) -> None:
    """Its beginning is on record and not rendered again."""
    async with gateway_harness(nano, SHORT) as harness:
        reply = await post(harness, CHAT, BODIES[CHAT])
        message = reply.json()["choices"][0]["message"]
        more = [*HI, {"role": "assistant", "content": message["content"]}, user("x" * LIMIT)]
        reply = await post(harness, CHAT, {**BODIES[CHAT], "messages": more})
        assert reply.status_code == 400 and error_of(reply, CHAT)["code"] == "context_length_exceeded"


async def test_tokens_of_any_length_are_counted(nano: Path) -> None:
    async with gateway_harness(nano, SHORT) as harness:
        for characters in (2, LIMIT, 40 * LIMIT):
            counted = await harness.anthropic.messages.count_tokens(model="any", messages=[user("x" * characters)])
            assert counted.input_tokens == characters + 5
        assert not refused(harness)


HOSTED: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    RESPONSES: (
        [
            {"type": "web_search"},
            {"type": "web_search_preview"},
            {"type": "namespace", "name": "mine", "description": "tools", "tools": []},
            {"type": "file_search", "vector_store_ids": ["a"]},
            {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "linux"},
            {"type": "code_interpreter", "container": {"type": "auto"}},
            {"type": "mcp", "server_label": "x", "server_url": "https://example.com"},
            {"type": "something_new", "of": 1},
        ],
        {"type": "function", **FUNCTION},
    ),
    MESSAGES: (
        [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
            {"type": "code_execution_20250522", "name": "code_execution"},
        ],
        ANTHROPIC_TOOL,
    ),
    CHAT: ([{"type": "web_search"}], TOOL),
}


async def test_hosted_tools_are_left_out_and_on_record(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        for (path, (hosted, own)), stream in product(HOSTED.items(), (False, True)):
            before = harness.gateway.metrics()["gateway/hosted_tools_dropped"]
            reply = await post(harness, path, {**BODIES[path], "tools": [*hosted, own], "stream": stream})
            assert reply.status_code == 200, reply.text
            call = harness.source.calls[-1]
            assert call.dropped_tools == tuple(tool["type"] for tool in hosted)
            assert [tool["function"]["name"] for tool in call.request["tools"]] == ["add"]
            alone = await post(harness, path, {**BODIES[path], "tools": hosted, "tool_choice": hosted[0]})
            assert alone.status_code == 200, alone.text
            assert harness.gateway.metrics()["gateway/hosted_tools_dropped"] == before + 2 * len(hosted)
            bad = await post(harness, path, {**BODIES[path], "tools": [*hosted, own], "temperature": "warm"})
            assert bad.status_code == 400


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_without_a_type_is_the_reply_that_it_repeats(nano: Path, named: bool, stream: bool) -> None:
    """As the Vercel AI SDK sends it with `store: false`; it keeps its recorded ids."""
    async with gateway_harness(nano) as harness:
        harness.set_replies("the first", "the second")
        assert (await post(harness, RESPONSES, {**BODIES[RESPONSES], "store": False})).status_code == 200
        first = harness.source.calls[-1]
        said = {"role": "assistant", "content": [{"type": "output_text", "text": "the first"}]}
        items = [user("hi"), said | ({"id": "msg_1"} if named else {}), user("more")]
        reply = await post(harness, RESPONSES, {"model": "m", "input": items, "store": False, "stream": stream})
        assert reply.status_code == 200 and "the second" in reply.text, reply.text
        whole = [*first.prompt_ids, *harness.ids("the first")]
        assert list(harness.source.calls[-1].prompt_ids)[: len(whole)] == whole


async def test_all_texts_of_a_message_are_in_the_prompt(nano: Path) -> None:
    contents = (
        ([{"type": "output_text", "text": "one "}, {"type": "output_text", "text": "two"}], "one two"),
        ([{"type": "refusal", "refusal": "one two"}], "one two"),
        ([], ""),
    )
    async with gateway_harness(nano) as harness:
        for content, text in contents:
            items = [user("hi"), {"type": "message", "role": "assistant", "content": content, "id": "m"}, user("more")]
            reply = await post(harness, RESPONSES, {"model": "m", "input": items})
            assert reply.status_code == 200, reply.text
            assert harness.source.calls[-1].request["messages"][1]["content"] == text


@pytest.mark.parametrize("kind", ["refusal", "thinking"])
async def test_recorded_ids_are_reused_behind_a_refusal(nano: Path, kind: str) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("the reply", "the last")
        said = {"role": "assistant", "content": [{"type": kind, kind: "no"}]}
        messages = [user("hi"), said, user("and now?")]
        body = {"model": "m", "messages": messages}
        assert (await post(harness, CHAT, body)).status_code == 200
        first = harness.source.calls[-1]
        assert "no" in harness.prompt()
        more = [*messages, {"role": "assistant", "content": "the reply"}, user("more")]
        assert (await post(harness, CHAT, {**body, "messages": more})).status_code == 200
        whole = [*first.prompt_ids, *harness.ids("the reply")]
        assert list(harness.source.calls[-1].prompt_ids)[: len(whole)] == whole


def calls_in(reply: dict[str, Any], path: str) -> str:
    """The calls of tools in a reply, as a text."""
    if path == CHAT:
        return str(reply["choices"][0]["message"].get("tool_calls"))
    return str([item for item in reply["output"] if item["type"] == "function_call"])


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_choice_among_some_tools_lets_them_be_called(nano: Path, path: str, mode: str) -> None:
    own = TOOL if path == CHAT else {"type": "function", **FUNCTION}
    inner = {"mode": mode, "tools": [own]}
    choice = {"type": "allowed_tools", **({"allowed_tools": inner} if path == CHAT else inner)}
    async with gateway_harness(nano) as harness:
        for text, called in ((TOOL_CALL, True), ("no call", False)):
            harness.set_replies(text)
            reply = await post(harness, path, {**BODIES[path], "tools": [own], "tool_choice": choice})
            assert reply.status_code == 200, reply.text
            assert ("arguments" in calls_in(reply.json(), path)) is called
            assert (harness.source.calls[-1].sampling.get("structured_outputs") is not None) is (mode == "required")
        assert harness.gateway.metrics()["gateway/malformed_calls"] == (mode == "required")


async def test_what_a_hosted_tool_would_include_is_left_out(nano: Path) -> None:
    """As the Vercel AI SDK asks for the sources of a web search."""
    asked = {"tools": [{"type": "web_search"}], "include": ["web_search_call.action.sources"]}
    async with gateway_harness(nano) as harness:
        reply = await post(harness, RESPONSES, {**BODIES[RESPONSES], **asked})
        assert reply.status_code == 200, reply.text


async def test_a_base_url_may_lack_the_version(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        for path, body in BODIES.items():
            for short in (path.removeprefix("/v1"), path):
                reply = await post(harness, short, body)
                assert reply.status_code == 200, reply.text
                assert harness.source.calls[-1].request.get("path") == path
        models = await harness.http.get(harness.session["anthropic_base_url"] + "/models")
        assert models.status_code == 200 and models.json()["data"]


@pytest.mark.skipif(not TAKES_NAMESPACES, reason="vLLM 0.24 takes no namespaces: they are left out as hosted tools are")
@pytest.mark.parametrize("stream", [False, True])
async def test_the_functions_of_a_namespace_are_called(nano: Path, stream: bool) -> None:
    """As Codex offers its sub-agents. The call that is sent back keeps its recorded ids."""
    call_text = '<tool_call>{"name": "agents__add", "arguments": {"a": 2}}</tool_call>'
    members = [{"type": "function", **FUNCTION}, {"type": "custom", "name": "free"}]
    group = {"type": "namespace", "name": "agents", "description": "others", "tools": members}
    async with gateway_harness(nano) as harness:
        harness.set_replies(call_text, "fine")
        asked: dict[str, Any] = {"model": "m", "tools": [group], "store": False}
        reply = await harness.openai.responses.create(input=HI, stream=stream, **asked)
        if stream:
            reply = [event async for event in reply][-1].response
        (item,) = [item for item in reply.output if item.type == "function_call"]
        assert (item.namespace, item.name, json.loads(item.arguments)) == ("agents", "add", {"a": 2})
        first = harness.source.calls[-1]
        assert [tool["function"]["name"] for tool in first.request["tools"]] == ["agents__add"]
        result = {"type": "function_call_output", "call_id": item.call_id, "output": "started"}
        more = [*HI, item.model_dump(exclude_none=True), result]
        await harness.openai.responses.create(input=more, **asked)
        whole = [*first.prompt_ids, *harness.ids(call_text)]
        assert list(harness.source.calls[-1].prompt_ids)[: len(whole)] == whole
        assert harness.gateway.metrics()["gateway/hosted_tools_dropped"] == 0


async def test_hosted_tools_are_refused_by_a_setting(nano: Path) -> None:
    async with gateway_harness(nano, rules=RequestRules(hosted_tools="refuse")) as harness:
        for path, (hosted, own) in HOSTED.items():
            reply = await post(harness, path, {**BODIES[path], "tools": [own, *hosted]})
            assert reply.status_code == 400 and hosted[0]["type"] in error_of(reply, path)["message"]
            assert (await post(harness, path, {**BODIES[path], "tools": [own]})).status_code == 200


async def test_a_response_is_stored_continued_and_deleted(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        client = harness.openai.responses
        harness.set_replies("blue")
        first = await client.create(model="m", input="a colour?", instructions="be brief")
        assert (await client.retrieve(first.id)).output_text == "blue"
        harness.set_replies("sky")
        second = await client.create(model="m", input="of what?", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        events = [
            event
            async for event in await client.create(
                model="m", input="more?", previous_response_id=second.id, stream=True
            )
        ]
        third = events[-1].response
        assert third.previous_response_id == second.id and events[0].response.previous_response_id == second.id
        assert (await client.retrieve(third.id)).output_text == "sky"
        calls = harness.source.calls
        assert harness.prompt(0).count("<|system|>") == 1 and harness.prompt(1).count("<|system|>") == 0
        known = [*calls[1].prompt_ids, *harness.recorder.ids(calls[1].call_id)]
        assert list(calls[2].prompt_ids)[: len(known)] == known, "the ids on record"
        assert [call.response["id"] for call in calls] == [first.id, second.id, third.id]
        await client.delete(first.id)
        for gone in (client.retrieve(first.id), client.delete(first.id)):
            with pytest.raises(openai.NotFoundError):
                await gone
        with pytest.raises(openai.BadRequestError) as refused:
            await client.create(model="m", input="hi", previous_response_id=first.id)
        assert refused.value.code == "previous_response_not_found"


async def test_tool_results_continue_a_stored_response(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies('<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>')
        asked: dict[str, Any] = {"model": "m", "tools": [{"type": "function", **FUNCTION}]}
        first = await harness.openai.responses.create(input="add", **asked)
        (call,) = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
        harness.set_replies("five")
        await harness.openai.responses.create(input=[result], previous_response_id=first.id, **asked)
        calls = harness.source.calls
        known = [*calls[0].prompt_ids, *harness.recorder.ids(calls[0].call_id)]
        assert list(calls[1].prompt_ids)[: len(known)] == known and "5" in harness.prompt(1)


async def test_stored_responses_are_bounded_and_a_sessions_own(nano: Path) -> None:
    async with gateway_harness(nano, rules=RequestRules(max_stored=2)) as harness:
        client = harness.openai.responses
        ids = [(await client.create(model="m", input="hi")).id for _ in range(3)]
        with pytest.raises(openai.NotFoundError):
            await client.retrieve(ids[0])
        assert (await client.retrieve(ids[2])).id == ids[2]
        unstored = await client.create(model="m", input="hi", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.retrieve(unstored.id)
        other = await harness.open()
        foreign = await harness.http.get(f"{other['base_url']}/responses/{ids[2]}")
        assert foreign.status_code == 404
        await harness.admin("POST", f"sessions/{harness.session['session_id']}/close", {})
        assert (await harness.http.get(f"{harness.session['base_url']}/responses/{ids[2]}")).status_code == 410


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


ATTACKS: dict[str, tuple[str, Any]] = {
    "structured outputs in a text": (CHAT, {"structured_outputs": "no"}),
    "structured outputs in a list": (CHAT, {"structured_outputs": [1]}),
    "structured outputs in a number": (PLAIN, {"structured_outputs": 3}),
    "a deep schema": (CHAT, {"structured_outputs": {"json": nested(300)}}),
    "a deep schema in a text": (CHAT, {"structured_outputs": {"json": json.dumps(nested(90))}}),
    "a wide schema": (CHAT, {"structured_outputs": {"json": {"enum": list(range(30_000))}}}),
    "many deep schemas": (CHAT, {"structured_outputs": {"json": {"anyOf": [nested(25)] * 1000}}}),
    "a deep response format": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(300)}}},
    ),
    "a deep text format": (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": nested(300)}}},
    ),
    "a deep tool": (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(300)}}]}),
    "a deep tool of messages": (MESSAGES, {"tools": [{"name": "f", "input_schema": nested(300)}]}),
    "a deep output": (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": nested(300)}}}),
    "choices": (CHAT, {"n": 1 << 60}),
    "choices in a text": (CHAT, {"n": "100000"}),
    "choices of 400 digits": (CHAT, {"n": 10**400}),
    "prompts": (PLAIN, {"prompt": ["a"] * 1000}),
    "choices of prompts": (PLAIN, {"prompt": ["a"] * 100, "n": 100}),
}


async def test_an_attack_is_refused_at_once(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        for what, (path, fields) in ATTACKS.items():
            began = time.monotonic()
            reply = await post(harness, path, {**BODIES[path], **fields})
            assert reply.status_code == 400, (what, reply.text)
            assert time.monotonic() - began < 2, what
            assert error_of(reply, path)["message"], what
        assert refused(harness) == [(path, 400) for path, _ in ATTACKS.values()] and not harness.source.calls


async def test_schemas_of_a_sane_depth_are_taken(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        began = time.monotonic()
        body = {**BODIES[CHAT], "structured_outputs": {"json": nested(12)}}
        assert (await post(harness, CHAT, body)).status_code == 200
        assert time.monotonic() - began < 5


REWARDS: dict[str, bytes] = {
    "half a character": b'{"reward": 1, "name": "\\ud800"}',
    "400 digits": b'{"reward": 1' + b"0" * 400 + b"}",
    "5000 digits": b'{"reward": 1' + b"0" * 5000 + b"}",
    "no number": b'{"reward": NaN}',
    "infinity": b'{"reward": 1e999}',
    "a text": b'{"reward": "1"}',
    "nothing": b"{}",
    "a name that is no text": b'{"reward": 1, "name": {}}',
    "a call of half a character": b'{"reward": 1, "call": "\\ud800"}',
    "a call that is no text": b'{"reward": 1, "call": []}',
}


async def test_a_reward_that_is_none_is_refused(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        for what, body in REWARDS.items():
            reply = await post(harness, "/v1/session/reward", body)
            assert reply.status_code == 400, (what, reply.text)
        assert refused(harness) == [("/v1/session/reward", 400)] * len(REWARDS)


async def test_headers_of_many_digits_are_no_error(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        many = {"x-stainless-retry-count": "9" * 5000}
        assert (await post(harness, CHAT, BODIES[CHAT], headers=many)).status_code == 200


async def test_a_public_address_is_what_agents_get(nano: Path) -> None:
    for address, expected in (
        ("agents.example", "http://agents.example:"),
        ("https://a.example/x/", "https://a.example/x"),
    ):
        async with gateway_harness(nano, public_address=address) as harness:
            session = await harness.gateway.admin.open({"uid": "u"})
            assert session["base_url"].startswith(expected)


async def test_the_loopback_address_is_served_beside_the_hosts(nano: Path) -> None:
    """Another address of 127.0.0.0/8 stands for that of the node."""
    async with gateway_harness(nano, host="127.0.0.2") as harness:
        port = harness.gateway.url.rpartition(":")[2]
        for host in ("127.0.0.2", "127.0.0.1"):
            reply = await harness.http.get(f"http://{host}:{port}/health")
            assert reply.status_code == 200


EMPTY_FIELDS = (
    *(
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "parallel_tool_calls",
        "stop",
        "stop_sequences",
        "n",
        "seed",
    ),
    *("response_format", "metadata", "logit_bias", "logprobs", "top_logprobs", "system", "instructions", "include"),
    *("text", "reasoning", "reasoning_effort", "thinking", "stream", "stream_options", "store", "user", "suffix"),
    *("temperature", "top_p", "top_k", "presence_penalty", "service_tier", "truncation", "background", "modalities"),
    *("previous_response_id", "conversation", "prompt_cache_key", "max_completion_tokens", "max_output_tokens"),
    *("structured_outputs", "output_config", "context_management", "mcp_servers", "container", "documents"),
    *("chat_template_kwargs", "extra_body", "kv_transfer_params", "cache_salt", "bad_words", "echo", "priority"),
)
SAID = {"role": "assistant", "content": "so"}
EMPTY_FORMS: dict[str, list[dict[str, Any]]] = {  # each is the same as the first
    CHAT: [
        {"messages": [*HI, SAID, *HI]},
        {"messages": [*HI, {**SAID, "tool_calls": [], "annotations": [], "audio": None, "refusal": None}, *HI]},
        {"messages": [*HI, {**SAID, "tool_calls": None, "function_call": None, "name": None}, {**HI[0], "name": None}]},
    ],
    RESPONSES: [
        {"input": [*HI, SAID, *HI]},
        {"input": [*HI, {**SAID, "type": "message", "id": None, "status": None}, *HI]},
        {"input": [*HI, {**SAID, "content": [{"type": "output_text", "text": "so", "annotations": []}]}, *HI]},
    ],
    MESSAGES: [
        {"messages": [*HI, SAID, *HI]},
        {"messages": [*HI, {**SAID, "content": [{"type": "text", "text": "so", "citations": None}]}, *HI]},
    ],
}


@pytest.mark.parametrize("path", [*BODIES, COUNT])
async def test_an_empty_field_is_the_same_as_none(nano: Path, path: str) -> None:
    asked = BODIES[MESSAGES] if path == COUNT else BODIES[path]
    forms = [{}, *({name: empty} for name in EMPTY_FIELDS if name not in asked for empty in (None, "", [], {}))]
    forms += [{"tools": [], "tool_choice": choice} for choice in ("auto", "none", {"type": "auto"})]
    async with gateway_harness(nano) as harness:
        harness.set_replies("yes", end=False)
        for same in (forms, EMPTY_FORMS.get(path, [])):
            replies = [await post(harness, path, {**asked, **form}) for form in same]
            refused = [
                (form, reply.text) for form, reply in zip(same, replies, strict=True) if reply.status_code != 200
            ]
            assert not refused
            calls, harness.source.calls = harness.source.calls, []
            assert {repr((call.prompt_ids, sorted(call.sampling.items()))) for call in calls} == (
                set() if path == COUNT or not same else {repr((calls[0].prompt_ids, sorted(calls[0].sampling.items())))}
            )
            assert len(calls) == (0 if path == COUNT else len(same))


async def test_several_choices_are_refused_where_the_real_service_has_one(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        for path in (RESPONSES, MESSAGES):
            reply = await post(harness, path, {**BODIES[path], "n": 2})
            assert reply.status_code == 400 and "Unknown parameter: 'n'" in error_of(reply, path)["message"]
            assert (await post(harness, path, {**BODIES[path], "n": 1})).status_code == 200
        assert len(harness.source.calls) == 2


async def test_an_empty_list_of_contents_is_a_message_without_text(nano: Path) -> None:
    """As adapters send the result of a tool that gave nothing; pydantic makes an iterator of it."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    async with gateway_harness(nano) as harness:
        for role in ("tool", "user", "developer", "system", "assistant"):
            calling = [{"role": "assistant", "content": None, "tool_calls": [call]}] if role == "tool" else []
            empty = {"role": role, "content": [], **({"tool_call_id": "c"} if role == "tool" else {})}
            reply = await post(harness, CHAT, {"messages": [*HI, *calling, empty, *HI]})
            assert reply.status_code == 200, (role, reply.text)
            assert json.loads(json.dumps(harness.source.calls[-1].request))["messages"][-2]["content"] == []
