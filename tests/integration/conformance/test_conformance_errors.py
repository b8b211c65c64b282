"""Errors as the SDKs' exceptions: keys, models, bodies, limits; and clients that leave."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.conformance_server import GATEWAY, MAX_BODY, MODEL, Server, Servers
from support.conformance_words import HI, LONG, TALE, TOOL

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.serial]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 3},
}
paths = pytest.mark.parametrize("path", PATHS)


def told(reply: httpx.Response, path: str) -> str:
    """The error's message, after a look at its shape."""
    assert "Traceback" not in reply.text
    error = reply.json().get("error")
    if path.startswith("/v1/messages"):
        assert reply.json().get("type") == "error" and set(error) >= {"type", "message"}
    else:
        assert error and set(error) >= {"message", "type", "param", "code"}
    return str(error["message"])


def body(path: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, **PATHS[path], **more}


@pytest.mark.parametrize("call", ["chat", "completions", "responses", "models"])
def test_a_wrong_key_is_an_authentication_error(server: Server, call: str) -> None:
    client = server.openai.with_options(api_key="nobody's")
    calls: dict[str, Callable[[], Any]] = {
        "chat": lambda: client.chat.completions.create(model=MODEL, messages=HI),
        "completions": lambda: client.completions.create(model=MODEL, prompt="hi"),
        "responses": lambda: client.responses.create(model=MODEL, input="hi"),
        "models": client.models.list,
    }
    with pytest.raises(openai.AuthenticationError):
        calls[call]()


def test_a_wrong_key_is_an_authentication_error_of_messages_too(server: Server) -> None:
    client = server.anthropic.with_options(auth_token="nobody's")
    with pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model=MODEL, max_tokens=3, messages=HI)


@paths
def test_a_wrong_key_is_told_in_the_apis_shape(server: Server, path: str) -> None:
    reply = server.post(path, json=body(path), headers={"authorization": "Bearer nobody's"})
    assert reply.status_code == 401 and told(reply, path)


def test_anthropics_own_header_carries_the_key(server: Server) -> None:
    reply = server.http.post(f"{server.url}/v1/messages", json=body("/v1/messages"), headers={"x-api-key": server.key})
    assert reply.status_code == 200


def test_the_path_carries_the_key(server: Server) -> None:
    url = f"{server.url}/s/{server.key}"
    client = server.openai.with_options(base_url=f"{url}/v1", api_key="none")
    assert client.chat.completions.create(model=MODEL, messages=HI, max_tokens=1).choices
    other = server.anthropic.with_options(base_url=url, auth_token="none")
    assert other.messages.create(model=MODEL, messages=HI, max_tokens=1).content is not None


@paths
def test_a_model_that_is_not_there_is_not_found(server: Server, path: str) -> None:
    reply = server.post(path, json=body(path, model="other"))
    assert reply.status_code == 404 and "other" in told(reply, path)


def test_a_model_that_is_not_there_is_the_sdks_error(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        server.openai.chat.completions.create(model="other", messages=HI)
    assert "other" in refused.value.message


def test_an_address_that_is_not_there_is_not_found(server: Server) -> None:
    assert server.post("/v1/nothing", json={}).status_code == 404


def test_another_method_is_not_allowed(server: Server) -> None:
    headers = {"authorization": f"Bearer {server.key}"}
    assert server.http.get(f"{server.url}/v1/chat/completions", headers=headers).status_code == 405


MALFORMED: dict[str, bytes] = {
    "no json": b'{"model": ',
    "nothing": b"",
    "a list": b"[1]",
    "a number": b"3",
    "no utf-8": b'{"model": "nano", "messages": [{"role": "user", "content": "\xff"}], "max_tokens": 3}',
    "no character": b'{"model":"nano","max_tokens":3,"prompt":"\\ud800","input":"\\ud800",'
    b'"messages":[{"role":"user","content":"\\ud800"}]}',
    "not a number": b'{"model":"nano","max_tokens":3,"prompt":"hi","input":"hi","temperature":NaN,'
    b'"messages":[{"role":"user","content":"hi"}]}',
    "too deep": b'{"model":' + b"[" * 6000 + b"]" * 6000 + b"}",
}


@paths
@pytest.mark.parametrize("what", MALFORMED)
def test_what_cannot_be_read_is_a_bad_request(server: Server, path: str, what: str) -> None:
    reply = server.post(path, content=MALFORMED[what], headers={"content-type": "application/json"})
    assert reply.status_code == 400 and told(reply, path)


@paths
@pytest.mark.parametrize("wrong", [{"temperature": "warm"}, {"stream": "perhaps"}, {"model": 3}])
def test_a_value_of_the_wrong_type_is_a_bad_request(server: Server, path: str, wrong: dict[str, Any]) -> None:
    reply = server.post(path, json=body(path, **wrong))
    assert reply.status_code == 400 and next(iter(wrong)) in told(reply, path)


@paths
def test_a_body_past_the_limit_is_too_large(server: Server, path: str) -> None:
    reply = server.post(path, json=body(path, padding="x" * MAX_BODY))
    assert reply.status_code == 413 and told(reply, path)


BAD_TOOLS: dict[str, Any] = {
    "no name": {"tools": [{"type": "function", "function": {"parameters": {}}}]},
    "a schema of no type": {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
    "a choice of no tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    "a choice without tools": {"tool_choice": "required"},
    "an unknown choice": {"tools": [TOOL], "tool_choice": "perhaps"},
    "an empty list": {"tools": []},
    "a schema that cannot be a grammar": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}],
        "tool_choice": "required",
    },
}


@pytest.mark.parametrize("what", BAD_TOOLS)
def test_a_bad_tool_is_a_bad_request(server: Server, what: str) -> None:
    with pytest.raises(openai.BadRequestError):
        server.openai.chat.completions.create(model=MODEL, messages=HI, max_tokens=3, **BAD_TOOLS[what])


@pytest.fixture
def busy(server: Server, servers: Servers) -> Iterator[Server]:
    """A server that runs as much as it may: the gateway, in a session of one call at once."""
    narrow = servers.server(GATEWAY, limits={"max_concurrent": 1}) if server.name == GATEWAY else server
    asked = {"model": MODEL, "messages": TALE, "stream": True, "max_tokens": 900, "extra_body": LONG}
    with narrow.openai.chat.completions.create(**asked) as stream:
        next(iter(stream))
        yield narrow
    narrow.settled()


def test_too_much_at_once_is_a_rate_limit_that_says_when_to_come_again(busy: Server) -> None:
    with pytest.raises(openai.RateLimitError) as refused:
        busy.openai.chat.completions.create(model=MODEL, messages=HI, max_tokens=1)
    assert int(refused.value.response.headers["retry-after"]) > 0
    with pytest.raises(anthropic.RateLimitError):
        busy.anthropic.messages.create(model=MODEL, messages=HI, max_tokens=1)


def test_an_sdk_that_may_retry_waits_its_turn(server: Server, servers: Servers) -> None:
    """The call in the way ends within the SDK's patience."""
    narrow = servers.server(GATEWAY, limits={"max_concurrent": 1}) if server.name == GATEWAY else server
    asked = {"model": MODEL, "messages": TALE, "max_tokens": 300, "extra_body": LONG}
    with narrow.openai.chat.completions.create(stream=True, **asked) as stream:
        next(iter(stream))
        patient = narrow.openai.with_options(max_retries=8)
        assert patient.chat.completions.create(model=MODEL, messages=HI, max_tokens=1).choices
    assert not any(narrow.settled().values())


ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 900, **LONG},
    "/v1/completions": {"max_tokens": 900, **LONG},
    "/v1/responses": {"max_output_tokens": 900, **LONG},
    "/v1/messages": {
        "max_tokens": 900,
        "output_config": {"format": {"type": "json_schema", "schema": {"const": "x" * 880}}},
    },
}


def leave(server: Server, path: str, asked: dict[str, Any]) -> None:
    """Asks, sees the call run (of a stream, reads a little), and is gone."""
    url = httpx.URL(server.url)
    headers = {"authorization": f"Bearer {server.key}", "content-type": "application/json"}
    with contextlib.closing(http.client.HTTPConnection(url.host, url.port, timeout=30)) as connection:
        connection.request("POST", path, json.dumps(asked), headers)
        if asked["stream"]:
            reply = connection.getresponse()
            assert reply.status == 200 and all(reply.readline() for _ in range(6))
        limit = time.monotonic() + 10
        while not server.running()["engine"]:
            assert time.monotonic() < limit, "the call does not run"


@paths
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_leaves_nothing_running(server: Server, path: str, stream: bool) -> None:
    leave(server, path, body(path, stream=stream, **ASKED[path]))
    assert not any(server.settled().values()), server.running()
    if server.admin is not None:
        view = server.admin("GET", f"sessions/{server.session['session_id']}").json()
        assert view["turns"] == 1 and view["tokens"] < 880, "the call was not cut"


def test_a_client_that_leaves_several_choices_leaves_nothing_running(server: Server) -> None:
    asked = {"model": MODEL, "messages": TALE, "n": 4, "stream": True, "max_tokens": 400, "extra_body": LONG}
    with server.openai.chat.completions.create(**asked) as stream:
        for _ in zip(range(8), stream, strict=False):
            pass
        assert any(server.running().values())
    assert not any(server.settled().values()), server.running()


def test_a_reply_after_a_client_left_is_as_ever(server: Server) -> None:
    with server.openai.chat.completions.create(
        model=MODEL, messages=TALE, stream=True, max_tokens=400, extra_body=LONG
    ) as stream:
        next(iter(stream))
    reply = server.openai.chat.completions.create(model=MODEL, messages=HI, max_tokens=2, temperature=0)
    assert reply.usage.completion_tokens == 2
