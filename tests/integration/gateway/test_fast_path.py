"""The fast path to vLLM's handlers gives what FastAPI's routing gives, byte for byte."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fastapi_route import route
from support.gateway import TOOL, TOOL_CALL, GatewayHarness, gateway_harness, user

from seamless_verl.gateway import fast_path
from seamless_verl.gateway.fast_path import ServingApp

pytestmark = pytest.mark.integration
ROUTED = (b"x-routed", b"yes")  # a request with this header is routed by FastAPI
MADE_UP = (
    (re.compile(rb"[0-9a-f]{16,32}"), b"<id>"),
    (re.compile(rb'("created(_at)?"|"completed_at"):\s*[0-9.]+'), rb"\1:<time>"),
)
TEXTS = st.text(max_size=20) | st.sampled_from(["hi", "naïve 漢字 🙂", "x" * 5000, ""])
ODD = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
    | st.just([])
    | st.just({})
)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "nobody"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS | PARTS | ODD}), max_size=4)
HI = st.lists(st.builds(user, TEXTS.filter(bool)), min_size=1, max_size=3)
SAMPLED: dict[str, Any] = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "seed": st.integers(0, 5),
    "stop": st.lists(TEXTS.filter(bool), max_size=2),
    "stream": st.booleans(),
    "user": TEXTS,
    "nothing_known": ODD,
}
CHAT = SAMPLED | {
    "max_tokens": st.integers(1, 9000),
    "n": st.integers(1, 2),
    "stream_options": st.just({"include_usage": True}),
    "tools": st.just([TOOL]),
    "tool_choice": st.sampled_from(["auto", "none"]),
    "response_format": st.just({"type": "json_object"}),
    "chat_template_kwargs": st.just({"colour": "red"}),
}
LOGPROBS = st.fixed_dictionaries({"logprobs": st.just(True), "top_logprobs": st.integers(0, 3)})
PROMPTS = TEXTS.filter(bool) | st.lists(st.integers(0, 255), min_size=1, max_size=5) | st.just(["a", "b"])
BODIES = {
    "/chat/completions": st.fixed_dictionaries({"messages": HI}, optional=CHAT),
    "/completions": st.fixed_dictionaries(
        {"prompt": PROMPTS},
        optional=SAMPLED | {"max_tokens": st.integers(1, 50), "logprobs": st.integers(0, 2), "echo": st.booleans()},
    ),
    "/responses": st.fixed_dictionaries(
        {"input": TEXTS.filter(bool) | HI}, optional={"stream": st.booleans(), "max_output_tokens": st.integers(1, 50)}
    ),
    "/messages": st.fixed_dictionaries(
        {"messages": HI, "max_tokens": st.integers(1, 50)},
        optional={"stream": st.booleans(), "system": TEXTS, "stop_sequences": st.lists(TEXTS.filter(bool), max_size=2)},
    ),
    "/messages/count_tokens": st.fixed_dictionaries({"messages": HI}, optional={"system": TEXTS}),
}
WRONG = {
    "messages": MESSAGES | ODD,
    "prompt": ODD,
    "input": ODD,
    **dict.fromkeys(["max_tokens", "temperature", "stop", "n", "tools", "tool_choice", "logprobs", "system"], ODD),
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A good body, or one with up to three fields that may be wrong."""
    body: dict[str, Any] = draw(BODIES[path])
    if path == "/chat/completions" and draw(st.booleans()):
        body |= draw(LOGPROBS)
    for name in draw(st.lists(st.sampled_from(sorted(WRONG)), min_size=1, max_size=3)) if draw(st.booleans()) else ():
        body[name] = draw(WRONG[name])
    return body


@pytest.fixture
def ways_taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that requests took, which their header chooses."""
    taken: list[str] = []
    serve, respond = ServingApp.__call__, fast_path._respond

    async def either(self: Any, scope: Any, receive: Any, send: Any) -> None:
        if ROUTED in scope["headers"]:
            taken.append("routed")
            await route(self, scope, receive, send)
        else:
            await serve(self, scope, receive, send)

    async def counted(*args: Any) -> None:
        taken.append("fast")
        await respond(*args)

    monkeypatch.setattr(ServingApp, "__call__", either)
    monkeypatch.setattr(fast_path, "_respond", counted)
    return taken


def describe(reply: httpx.Response, *, any_order: bool) -> tuple[int, list[tuple[str, str]], bytes]:
    """Status, headers and body, less what is another each time; `any_order`: with the events of a stream sorted."""
    body = reply.content
    for pattern, instead in MADE_UP:
        body = pattern.sub(instead, body)
    changing = ("date",) if len(body) == len(reply.content) else ("date", "content-length")
    headers = [(name, value) for name, value in reply.headers.items() if name not in changing]
    return reply.status_code, headers, b"\n\n".join(sorted(body.split(b"\n\n"))) if any_order else body


async def both(harness: GatewayHarness, url: str, body: Any) -> None:
    merged = body.get("prompt") == ["a", "b"] and body.get("stream") is True  # vLLM merges two streams as they come
    replies = []
    for headers in ({}, {"x-routed": "yes"}):
        reply = await harness.http.post(url, json=body, headers={"x-request-id": "mine"} | headers)
        replies.append(describe(reply, any_order=merged))
    assert replies[0] == replies[1], body


@pytest.mark.parametrize("path", BODIES)
def test_both_ways_give_the_same_response(nano: Path, path: str, ways_taken: list[str]) -> None:
    with asyncio.Runner() as runner:
        context = gateway_harness(nano, limit_s=None)
        harness = runner.run(context.__aenter__())

        @settings(max_examples=60, deadline=None, database=None, derandomize=True)
        @given(body=bodies(path), called=st.booleans())
        def alike(body: Any, called: bool) -> None:
            harness.set_replies("hello" if not called else TOOL_CALL, size=1000)
            base = harness.session["base_url"]
            runner.run(both(harness, base + path, {"model": "nano", **body}))

        try:
            alike()
        finally:
            runner.run(context.__aexit__(None, None, None))
    assert ways_taken.count("fast") > 10, "nearly all were refused: this compares refusals only"
    assert ways_taken.count("routed") > ways_taken.count("fast"), "none was refused"
