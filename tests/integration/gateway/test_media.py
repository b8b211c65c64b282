"""Images and documents that agents send: a placeholder takes the place of each, and no error ends the agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateway import TOOL, TOOL_CALL, GatewayHarness, gateway_harness, user

from seamless_verl.gateway.request_rules import RequestRules

pytestmark = pytest.mark.integration
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
URL = f"data:image/png;base64,{PIXEL}"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
PARTS: dict[str, list[dict[str, Any]]] = {
    "chat/completions": [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": URL}}],
    "responses": [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": URL}],
    "messages": [{"type": "text", "text": "what?"}, IMAGE],
}
FUNCTION: Any = TOOL["function"]
READ: Any = {"name": "add", "input_schema": FUNCTION["parameters"]}


async def look(harness: GatewayHarness, path: str, stream: bool = False) -> httpx.Response:
    asked = [{"role": "user", "content": PARTS[path]}]
    more: dict[str, Any] = {"input": asked} if path == "responses" else {"messages": asked, "max_tokens": 4}
    url = f"{harness.session['base_url']}/{path}"
    return await harness.http.post(url, json={"model": "nano", "stream": stream, **more})


@pytest.mark.parametrize("path", PARTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_image_becomes_a_placeholder_and_is_on_record(nano: Path, path: str, stream: bool) -> None:
    async with gateway_harness(nano) as harness:
        for _ in range(2):
            reply = await look(harness, path, stream)
            assert reply.status_code == 200, reply.text
        call = harness.source.calls[-1]
        assert call.replaced_media == ("image",) and PIXEL not in str(call.request)
        assert "[image left out: this model is given text only]" in str(call.request)
        assert harness.gateway.metrics()["gateway/media_replaced"] == 2


@pytest.mark.parametrize("path", PARTS)
async def test_a_setting_refuses_images(nano: Path, path: str) -> None:
    async with gateway_harness(nano, rules=RequestRules(media="refuse")) as harness:
        reply = await look(harness, path)
        assert reply.status_code == 400 and "no image" in reply.text


@pytest.mark.parametrize("kind", ["image", "document"])
async def test_a_tool_that_returns_one_continues_the_recorded_ids(nano: Path, kind: str) -> None:
    """As Claude Code's `Read` of a picture, or of a PDF. The call is written as no template would render it."""
    reply = TOOL_CALL.replace('"arguments": ', '"arguments":  ')
    async with gateway_harness(nano) as harness:
        harness.set_replies(reply, "fine")
        asked: dict[str, Any] = {"model": "nano", "max_tokens": 64, "tools": [READ]}
        first = await harness.anthropic.messages.create(messages=[user("look")], **asked)
        (use,) = [block for block in first.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{**IMAGE, "type": kind}]}
        called = {"role": "assistant", "content": [use.model_dump()]}
        await harness.anthropic.messages.create(
            messages=[user("look"), called, {"role": "user", "content": [result]}], **asked
        )
        before, call = harness.source.calls
        whole = [*before.prompt_ids, *harness.ids(reply)]
        assert list(call.prompt_ids)[: len(whole)] == whole and call.replaced_media == (kind,)
        assert [message["role"] for message in call.request["messages"]] == ["user", "assistant", "tool"]
        assert f"[{kind} left out" in str(call.request["messages"][-1]["content"])


async def test_tokens_of_a_message_with_an_image_are_counted(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        asked: Any = [{"role": "user", "content": PARTS["messages"]}]
        counted = await harness.anthropic.messages.count_tokens(model="nano", messages=asked)
        assert 0 < counted.input_tokens < 200
