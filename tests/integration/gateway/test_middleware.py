"""Keys, quotas and bad requests: each is refused in the form of the API that was called, never with a traceback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.gateway import ADMIN_KEY, GatewayHarness, Reply, gateway_harness, user

from seamless_verl.gateway import server
from seamless_verl.gateway.request_rules import RequestRules

pytestmark = pytest.mark.integration
CHAT = {"model": "nano", "messages": [user("hi")]}
MESSAGE = {**CHAT, "max_tokens": 9}
OPENAI, ANTHROPIC = "/v1/chat/completions", "/v1/messages"


def error_message(reply: httpx.Response, path: str) -> str:
    """The error's text, after a look at its shape."""
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    error = body["error"]
    assert set(error) >= {"type", "message"} and "Traceback" not in reply.text and ".py" not in reply.text
    if path.startswith(ANTHROPIC):
        assert body["type"] == "error" and set(error) == {"type", "message"}
    else:
        assert "type" not in body and set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


def post(harness: GatewayHarness, path: str, key: str | None = None, **options: Any) -> Awaitable[httpx.Response]:
    body = MESSAGE if path.endswith(ANTHROPIC) else CHAT
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    given = {"json": body, **options}
    return harness.http.post(harness.gateway.url + path, headers=headers | given.pop("headers", {}), **given)


@pytest.mark.parametrize("path", [OPENAI, "/v1/completions", "/v1/responses", ANTHROPIC])
async def test_wrong_and_missing_keys(nano: Path, path: str) -> None:
    async with gateway_harness(nano) as harness:
        for reply in (
            await post(harness, path),
            await post(harness, path, "nobody's"),
            await post(harness, f"/s/x{path}"),
        ):
            assert reply.status_code == 401
            error_message(reply, path)
        assert not harness.source.calls


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
async def test_both_ways_to_send_a_key(nano: Path, path: str) -> None:
    async with gateway_harness(nano) as harness:
        key = harness.session["key"]
        assert (await post(harness, path, key)).status_code == 200
        assert (await post(harness, path, headers={"x-api-key": key})).status_code == 200
        assert (await post(harness, f"/s/{key}{path}", "anything")).status_code == 200
        other = await harness.open()
        foreign = await post(harness, f"/s/{key}{path}", other["key"])
        assert foreign.status_code == 403
        error_message(foreign, path)


async def test_idle_connections_are_closed_in_time_and_calls_go_on(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that never sent a request, or the beginning of one, too."""
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 2)
    async with gateway_harness(nano) as harness:
        address = httpx.URL(harness.gateway.url)
        began = time.monotonic()
        idle = [await asyncio.open_connection(address.host, address.port) for _ in range(2000)]
        for _, writer in idle[::2]:
            writer.write(b"POST /v1/messages HTTP/1.1\r\n")
        assert (await post(harness, OPENAI, harness.session["key"])).status_code == 200
        async with asyncio.timeout(30):
            assert {await reader.read() for reader, _ in idle} == {b""}
        assert time.monotonic() - began > 2, "none was closed at once"
        for _, writer in idle:
            writer.close()


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
async def test_a_closed_session_takes_nothing_more(nano: Path, path: str) -> None:
    async with gateway_harness(nano) as harness:
        session = harness.session["session_id"]
        closed = await harness.admin("POST", f"sessions/{session}/close", {"reason": "done"})
        assert closed.json()["state"] == "closed"
        assert (await harness.admin("POST", f"sessions/{session}/close", {})).json()["reason"] == "done"
        reply = await post(harness, path, harness.session["key"])
        assert reply.status_code == 410 and "done" in error_message(reply, path)
        assert [event for event in harness.recorder.events if event[0] == "closed"] == [("closed", session, "done")]


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
async def test_an_expired_session_is_gone_and_on_record(nano: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "EXPIRY_SECONDS", 3600.0)  # the gateway's own look is not sooner than the test's
    async with gateway_harness(nano) as harness:
        session = await harness.open(limits={"lifetime": 1e-6})
        reply = await post(harness, path, session["key"])
        assert reply.status_code == 410 and "expired" in error_message(reply, path)
        assert await harness.gateway.admin.expire() == 1
        assert harness.recorder.events[-1][:2] == ("closed", session["session_id"])


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
@pytest.mark.parametrize("limits", [{"max_turns": 2}, {"max_tokens": 12}])
async def test_quotas_hold(nano: Path, path: str, limits: dict[str, int]) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("hello")
        session = await harness.open(limits=limits)
        assert [(await post(harness, path, session["key"])).status_code for _ in range(3)] == [200, 200, 403]
        error_message(await post(harness, path, session["key"]), path)
        view = (await harness.admin("GET", f"sessions/{session['session_id']}")).json()
        assert (view["turns"], view["tokens"], view["running"]) == (2, 12, 0)


async def test_a_token_quota_bounds_the_last_call(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        session = await harness.open(limits={"max_tokens": 4}, sampling={"max_tokens": 3})
        await post(harness, OPENAI, session["key"])
        await post(harness, OPENAI, session["key"])
        assert [call.sampling["max_tokens"] for call in harness.source.calls] == [3, 1]


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
async def test_too_many_calls_at_once_are_asked_to_wait(nano: Path, path: str) -> None:
    async with gateway_harness(nano, max_running=1) as harness:
        held = asyncio.Event()
        harness.source.replies = [Reply([104, 105, 258], hold=held)]
        running = asyncio.create_task(post(harness, OPENAI, harness.session["key"]))
        await harness.source.started.wait()
        reply = await post(harness, path, harness.session["key"])
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        error_message(reply, path)
        held.set()
        assert (await running).status_code == 200
        assert (await post(harness, path, harness.session["key"])).status_code == 200


async def test_sampling_is_the_sessions(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        sampling = {"defaults": {"top_p": 0.5, "top_k": 3}, "overrides": {"temperature": 1.0}}
        session = await harness.open(sampling=sampling)
        await post(harness, OPENAI, session["key"], json={**CHAT, "temperature": 0, "top_k": 4})
        await post(harness, ANTHROPIC, session["key"], json={**MESSAGE, "temperature": 0.2})
        asked = [
            {name: call.sampling.get(name) for name in ("temperature", "top_p", "top_k")} for call in _calls(harness)
        ]
        assert asked[0]["temperature"] == asked[1]["temperature"] == 1.0
        assert (asked[0]["top_k"], asked[1]["top_k"], asked[1]["top_p"]) == (4, 3, 0.5)


def _calls(harness: GatewayHarness) -> list[Any]:
    return list(harness.source.calls)


BAD: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "no json": (lambda: {"content": b"{"}, 400),
    "no object": (lambda: {"content": b"[1]"}, 400),
    "no utf-8": (lambda: {"content": b'{"model": "\xff"}'}, 400),
    "half a character": (
        lambda: {"content": b'{"model": "nano", "messages": [{"role": "user", "content": "\\ud800"}]}'},
        400,
    ),
    "too deep": (lambda: {"content": b"[" * 100_000}, 400),
    "nan": (lambda: {"content": b'{"temperature": NaN}'}, 400),
    "no messages": (lambda: {"json": {"model": "nano", "max_tokens": 3}}, 400),
    "wrong type": (lambda: {"json": {**MESSAGE, "temperature": "warm"}}, 400),
    "no such model": (lambda: {"json": {**MESSAGE, "model": "other"}}, 404),
    "too long": (lambda: {"json": {**MESSAGE, "messages": [user("x" * 9000)]}}, 400),
    "too large": (lambda: {"content": b" " * 200_001}, 413),
    "refused": (lambda: {"json": {**MESSAGE, "kv_transfer_params": {"prompt_token_ids": [1]}}}, 400),
}


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
@pytest.mark.parametrize("kind", BAD)
async def test_bad_requests_are_explained(nano: Path, path: str, kind: str) -> None:
    async with gateway_harness(nano, max_body=200000, rules=RequestRules(strict_model=True)) as harness:
        build, status = BAD[kind]
        reply = await post(harness, path, harness.session["key"], **{"json": None, **build()})
        assert reply.status_code == status, reply.text
        assert error_message(reply, path)
        assert not harness.source.calls


@pytest.mark.parametrize(
    "path", ["/v1/other", "/", "/inference/v1/other", "/metrics", "/tokenize", "/v1/chat/completions/batch"]
)
async def test_nothing_else_is_served(nano: Path, path: str) -> None:
    async with gateway_harness(nano) as harness:
        assert (await post(harness, path, harness.session["key"])).status_code == 404
        assert (await harness.http.get(harness.session["base_url"] + "/chat/completions")).status_code == 405
        assert (await harness.http.get(harness.gateway.url + "/health")).json()["status"] == "ok"


async def test_the_sdks_know_the_errors(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        await harness.admin("POST", f"sessions/{harness.session['session_id']}/close", {})
        with pytest.raises(openai.APIStatusError) as one:
            await harness.openai.chat.completions.create(**CHAT)
        with pytest.raises(anthropic.APIStatusError) as other:
            await harness.anthropic.messages.create(**MESSAGE)
        assert (one.value.status_code, one.value.code, other.value.status_code) == (410, "session_closed", 410)


async def test_admin_needs_its_key_and_says_what_is_wrong(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        url = f"{harness.gateway.url}/admin/sessions"
        for headers in ({}, {"x-api-key": harness.session["key"]}):
            assert (await harness.http.post(url, json={"uid": "u"}, headers=headers)).status_code == 401
        assert (await harness.http.post(url, json={"uid": "u"}, headers={"x-api-key": ADMIN_KEY})).status_code == 200
        for wrong in (
            {},
            {"uid": 3},
            {"uid": "u", "limits": {"max_turns": -1}},
            {"uid": "u", "limits": {"turns": 1}},
            {"uid": "u", "sampling": {"overrides": {"temperature": "hot"}}},
            {"uid": "u", "sampling": {"defaults": {"top_p": 2}}},
            {"uid": "u", "colour": "red"},
        ):
            assert (await harness.admin("POST", "sessions", wrong)).status_code == 400, wrong
        assert (await harness.admin("GET", "sessions/nobody")).status_code == 404
        assert (await harness.admin("GET", "other")).status_code == 404


async def test_rewards_are_posted_with_the_sessions_key(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        url = harness.session["base_url"] + "/session/reward"
        assert (await harness.http.post(url, json={"reward": 0.5})).status_code == 200
        assert (await harness.http.post(url, json={"reward": 1, "name": "tests"})).status_code == 200
        assert (await harness.http.post(url, json={"reward": "much"})).status_code == 400
        await harness.admin("POST", f"sessions/{harness.session['session_id']}/close", {})
        assert (await harness.http.post(url, json={"reward": 1, "name": "late"})).status_code == 410
        given = [event[2:] for event in harness.recorder.events if event[0] == "rewarded"]
        assert given == [("reward", 0.5), ("tests", 1.0)]


async def test_a_session_that_cannot_be_recorded_is_not_opened(nano: Path) -> None:
    async with gateway_harness(nano) as harness:

        async def broken(*args: Any) -> None:
            raise OSError("no space left")

        sessions = len(harness.gateway.table)
        harness.recorder.open_session = harness.recorder.post_reward = broken  # type: ignore[method-assign]
        reply = await harness.admin("POST", "sessions", {"uid": "u"})
        assert reply.status_code == 500 and "OSError" in error_message(reply, OPENAI)
        assert len(harness.gateway.table) == sessions
        reply = await harness.http.post(harness.session["base_url"] + "/session/reward", json={"reward": 1})
        assert reply.status_code == 500 and "OSError" in error_message(reply, OPENAI)
