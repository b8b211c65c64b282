"""Keys, quotas and bad requests: each is refused in the words of the API that was called, never with a traceback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.gateway import ADMIN_KEY, House, Reply, user, visit

pytestmark = pytest.mark.integration
CHAT = {"model": "nano", "messages": [user("hi")]}
MESSAGE = {**CHAT, "max_tokens": 9}
OPENAI, ANTHROPIC = "/v1/chat/completions", "/v1/messages"


def told(reply: httpx.Response, path: str) -> str:
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


def post(here: House, path: str, key: str | None = None, **options: Any) -> Awaitable[httpx.Response]:
    body = MESSAGE if path.endswith(ANTHROPIC) else CHAT
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    given = {"json": body, **options}
    return here.http.post(here.gateway.url + path, headers=headers | given.pop("headers", {}), **given)


@pytest.mark.parametrize("path", [OPENAI, "/v1/completions", "/v1/responses", ANTHROPIC])
def test_wrong_and_missing_keys(nano: Path, path: str) -> None:
    async def case(here: House) -> None:
        for reply in (await post(here, path), await post(here, path, "nobody's"), await post(here, f"/s/x{path}")):
            assert reply.status_code == 401
            told(reply, path)
        assert not here.source.calls

    visit(nano, case)


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
def test_both_ways_to_send_a_key(nano: Path, path: str) -> None:
    async def case(here: House) -> None:
        key = here.session["key"]
        assert (await post(here, path, key)).status_code == 200
        assert (await post(here, path, headers={"x-api-key": key})).status_code == 200
        assert (await post(here, f"/s/{key}{path}", "anything")).status_code == 200
        other = await here.open()
        foreign = await post(here, f"/s/{key}{path}", other["key"])
        assert foreign.status_code == 403
        told(foreign, path)

    visit(nano, case)


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
def test_a_closed_session_takes_nothing_more(nano: Path, path: str) -> None:
    async def case(here: House) -> None:
        session = here.session["session_id"]
        closed = await here.admin("POST", f"sessions/{session}/close", {"reason": "done"})
        assert closed.json()["state"] == "closed"
        assert (await here.admin("POST", f"sessions/{session}/close", {})).json()["reason"] == "done"
        reply = await post(here, path, here.session["key"])
        assert reply.status_code == 410 and "done" in told(reply, path)
        assert [event for event in here.record.events if event[0] == "closed"] == [("closed", session, "done")]

    visit(nano, case)


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
def test_an_expired_session_is_gone_and_on_record(nano: Path, path: str) -> None:
    async def case(here: House) -> None:
        session = await here.open(limits={"lifetime": 1e-6})
        reply = await post(here, path, session["key"])
        assert reply.status_code == 410 and "expired" in told(reply, path)
        assert await here.gateway.admin.expire() == 1
        assert here.record.events[-1][:2] == ("closed", session["session_id"])

    visit(nano, case)


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
@pytest.mark.parametrize("limits", [{"max_turns": 2}, {"max_tokens": 12}])
def test_quotas_hold(nano: Path, path: str, limits: dict[str, int]) -> None:
    async def case(here: House) -> None:
        here.say("hello")
        session = await here.open(limits=limits)
        assert [(await post(here, path, session["key"])).status_code for _ in range(3)] == [200, 200, 403]
        told(await post(here, path, session["key"]), path)
        view = (await here.admin("GET", f"sessions/{session['session_id']}")).json()
        assert (view["turns"], view["tokens"], view["running"]) == (2, 12, 0)

    visit(nano, case)


def test_a_token_quota_bounds_the_last_call(nano: Path) -> None:
    async def case(here: House) -> None:
        session = await here.open(limits={"max_tokens": 4}, sampling={"max_tokens": 3})
        await post(here, OPENAI, session["key"])
        await post(here, OPENAI, session["key"])
        assert [call.sampling["max_tokens"] for call in here.source.calls] == [3, 1]

    visit(nano, case)


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
def test_too_much_at_once_is_told_to_wait(nano: Path, path: str) -> None:
    async def case(here: House) -> None:
        held = asyncio.Event()
        here.source.replies = [Reply([104, 105, 258], hold=held)]
        running = asyncio.create_task(post(here, OPENAI, here.session["key"]))
        await here.source.begun.wait()
        reply = await post(here, path, here.session["key"])
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        told(reply, path)
        held.set()
        assert (await running).status_code == 200
        assert (await post(here, path, here.session["key"])).status_code == 200

    visit(nano, case, max_running=1)


def test_sampling_is_the_sessions(nano: Path) -> None:
    async def case(here: House) -> None:
        sampling = {"defaults": {"top_p": 0.5, "top_k": 3}, "overrides": {"temperature": 1.0}}
        session = await here.open(sampling=sampling)
        await post(here, OPENAI, session["key"], json={**CHAT, "temperature": 0, "top_k": 4})
        await post(here, ANTHROPIC, session["key"], json={**MESSAGE, "temperature": 0.2})
        asked = [{name: call.sampling.get(name) for name in ("temperature", "top_p", "top_k")} for call in _calls(here)]
        assert asked[0]["temperature"] == asked[1]["temperature"] == 1.0
        assert (asked[0]["top_k"], asked[1]["top_k"], asked[1]["top_p"]) == (4, 3, 0.5)

    visit(nano, case)


def _calls(here: House) -> list[Any]:
    return list(here.source.calls)


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
def test_bad_requests_are_explained(nano: Path, path: str, kind: str) -> None:
    async def case(here: House) -> None:
        build, status = BAD[kind]
        reply = await post(here, path, here.session["key"], **{"json": None, **build()})
        assert reply.status_code == status, reply.text
        assert told(reply, path)
        assert not here.source.calls

    visit(nano, case, max_body=200_000)


@pytest.mark.parametrize(
    "path", ["/v1/other", "/", "/inference/v1/generate", "/metrics", "/tokenize", "/v1/chat/completions/batch"]
)
def test_nothing_else_is_served(nano: Path, path: str) -> None:
    async def case(here: House) -> None:
        assert (await post(here, path, here.session["key"])).status_code == 404
        assert (await here.http.get(here.session["base_url"] + "/chat/completions")).status_code == 405
        assert (await here.http.get(here.gateway.url + "/health")).json()["status"] == "ok"

    visit(nano, case)


def test_the_sdks_know_the_errors(nano: Path) -> None:
    async def case(here: House) -> None:
        await here.admin("POST", f"sessions/{here.session['session_id']}/close", {})
        with pytest.raises(openai.APIStatusError) as one:
            await here.openai.chat.completions.create(**CHAT)
        with pytest.raises(anthropic.APIStatusError) as other:
            await here.anthropic.messages.create(**MESSAGE)
        assert (one.value.status_code, one.value.code, other.value.status_code) == (410, "session_closed", 410)

    visit(nano, case)


def test_admin_needs_its_key_and_says_what_is_wrong(nano: Path) -> None:
    async def case(here: House) -> None:
        url = f"{here.gateway.url}/admin/sessions"
        for headers in ({}, {"x-api-key": here.session["key"]}):
            assert (await here.http.post(url, json={"uid": "u"}, headers=headers)).status_code == 401
        assert (await here.http.post(url, json={"uid": "u"}, headers={"x-api-key": ADMIN_KEY})).status_code == 200
        for wrong in (
            {},
            {"uid": 3},
            {"uid": "u", "limits": {"max_turns": -1}},
            {"uid": "u", "limits": {"turns": 1}},
            {"uid": "u", "sampling": {"overrides": {"temperature": "hot"}}},
            {"uid": "u", "sampling": {"defaults": {"top_p": 2}}},
            {"uid": "u", "colour": "red"},
        ):
            assert (await here.admin("POST", "sessions", wrong)).status_code == 400, wrong
        assert (await here.admin("GET", "sessions/nobody")).status_code == 404
        assert (await here.admin("GET", "other")).status_code == 404

    visit(nano, case)


def test_rewards_are_posted_with_the_sessions_key(nano: Path) -> None:
    async def case(here: House) -> None:
        url = here.session["base_url"] + "/session/reward"
        assert (await here.http.post(url, json={"reward": 0.5})).status_code == 200
        await here.admin("POST", f"sessions/{here.session['session_id']}/close", {})
        assert (await here.http.post(url, json={"reward": 1, "name": "tests"})).status_code == 200
        assert (await here.http.post(url, json={"reward": "much"})).status_code == 400
        given = [event[2:] for event in here.record.events if event[0] == "rewarded"]
        assert given == [("reward", 0.5), ("tests", 1.0)]

    visit(nano, case)


def test_a_session_that_cannot_be_recorded_is_not_opened(nano: Path) -> None:
    async def case(here: House) -> None:
        async def broken(*args: Any) -> None:
            raise OSError("no space left")

        known = len(here.gateway.table)
        here.record.opened = here.record.rewarded = broken  # type: ignore[method-assign]
        reply = await here.admin("POST", "sessions", {"uid": "u"})
        assert reply.status_code == 500 and "OSError" in told(reply, OPENAI)
        assert len(here.gateway.table) == known
        reply = await here.http.post(here.session["base_url"] + "/session/reward", json={"reward": 1})
        assert reply.status_code == 500 and "OSError" in told(reply, OPENAI)

    visit(nano, case)
