"""A stream whose call gives nothing sends keepalives, which change neither what an SDK reads nor what is recorded."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fastapi_route import route
from support.gateway import EOS, TOOL, TOOL_CALL, GatewayHarness, MemoryRecorder, Reply, gateway_harness, user

from seamless_verl.gateway import http_responses
from seamless_verl.gateway.fast_path import ServingApp
from seamless_verl.gateway.http_responses import (
    COMMENT,
    PING,
    EventCounter,
    StreamKeepalive,
    keepalive_after,
)
from seamless_verl.trajectory.records import Finish

pytestmark = pytest.mark.integration
KEEPALIVE_S = 0.05
REPLY = "let me see. " + TOOL_CALL
FUNCTION: Any = TOOL["function"]
HI: dict[str, Any] = {"model": "nano", "messages": [user("hi")]}
CHAT = {**HI, "tools": [TOOL]}
TEXT = {"model": "nano", "prompt": "hi", "max_tokens": 200}
RESPONSE = {"model": "nano", "input": "hi", "tools": [{"type": "function", **FUNCTION}]}
MESSAGE = {
    **HI,
    "max_tokens": 200,
    "tools": [{"name": "add", "description": "adds", "input_schema": FUNCTION["parameters"]}],
}
KEEPALIVE = re.compile(rb'event: keepalive\ndata: \{"type": "keepalive", "sequence_number": (\d+)\}\n\n')
BODIES: dict[str, tuple[dict[str, Any], re.Pattern[bytes]]] = {
    "/chat/completions": (CHAT, re.compile(re.escape(COMMENT))),
    "/completions": (TEXT, re.compile(re.escape(COMMENT))),
    "/responses": (RESPONSE, KEEPALIVE),
    "/messages": (MESSAGE, re.compile(re.escape(PING))),
}
"""The body of a request of each API, and its keepalive."""
MADE_UP = (
    (re.compile(r"[0-9a-f]{16,32}"), "<id>"),
    (re.compile(r'("(?:created(?:_at)?|completed_at)"):\s*[0-9.]+'), r"\1:<time>"),
)


class KeepaliveCount:
    """How many keepalives all streams have sent."""

    def __init__(self) -> None:
        self.number, self._more = 0, asyncio.Event()

    def add(self) -> None:
        self.number += 1
        self._more.set()

    async def wait_for(self, more: int) -> None:
        enough = self.number + more
        while self.number < enough:
            self._more.clear()
            await self._more.wait()


@pytest.fixture
def keepalives_sent(monkeypatch: pytest.MonkeyPatch) -> KeepaliveCount:
    count = KeepaliveCount()

    def counted(path: str, events: EventCounter) -> bytes | None:
        keepalive = keepalive_after(path, events)
        if keepalive is not None:
            count.add()
        return keepalive

    monkeypatch.setattr(http_responses, "keepalive_after", counted)
    return count


@asynccontextmanager
async def slow_call(
    nano: Path, keepalives_sent: KeepaliveCount
) -> AsyncGenerator[tuple[GatewayHarness, Callable[[], None]], None]:
    """A gateway with frequent keepalives, and what holds its next call for two before its first token and two later."""
    recorder = MemoryRecorder(gate=asyncio.Event())
    async with gateway_harness(nano, recorder=recorder, keepalive_s=KEEPALIVE_S) as harness:
        gate = recorder.gate
        assert gate is not None
        gate.set()
        harness.set_replies(REPLY)
        ids, releasing = list(harness.source.replies[0].ids), []

        async def release(*held: asyncio.Event) -> None:
            for event in held:
                await keepalives_sent.wait_for(2)
                event.set()

        def slow_down() -> None:
            hold = asyncio.Event()
            gate.clear()
            harness.source.replies = [Reply(ids, hold=hold), Reply(ids)]
            releasing.append(asyncio.create_task(release(gate, hold)))

        yield harness, slow_down
        await asyncio.gather(*releasing)


def without_ids(text: str) -> str:
    for pattern, instead in MADE_UP:
        text = pattern.sub(instead, text)
    return text


def records(harness: GatewayHarness) -> list[Any]:
    """What is recorded of each call: ids, end and reply."""
    ids = [harness.recorder.ids(call.call_id) for call in harness.source.calls]
    ends = [json.dumps(end[1:], default=str) for end in harness.recorder.ends()]
    return list(zip(ids, map(without_ids, ends), strict=True))


async def read_chat(harness: GatewayHarness) -> tuple[str, int]:
    async with harness.openai.chat.completions.stream(**CHAT) as stream:
        return (await stream.get_final_completion()).model_dump_json(), 0


async def read_text(harness: GatewayHarness) -> tuple[str, int]:
    chunks = [chunk async for chunk in await harness.openai.completions.create(**TEXT, stream=True)]
    choices = [chunk.choices[0] for chunk in chunks]
    return "".join(choice.text for choice in choices) + str(choices[-1].finish_reason), 0


async def read_response(harness: GatewayHarness) -> tuple[str, int]:
    """The final response, and how many keepalives there were among its events."""
    async with harness.openai.responses.stream(**RESPONSE) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    kinds = [str(event.type) for event in events]
    numbers = [event.sequence_number for event in events]
    assert kinds[0] == "response.created" and numbers == sorted(numbers)
    own = [number for number, kind in zip(numbers, kinds, strict=True) if kind != "keepalive"]
    assert own == list(range(len(own)))
    return final.model_dump_json(), kinds.count("keepalive")


async def read_message(harness: GatewayHarness) -> tuple[str, int]:
    async with harness.anthropic.messages.stream(**MESSAGE) as stream:
        return (await stream.get_final_message()).model_dump_json(), 0


READERS: dict[str, Callable[[GatewayHarness], Awaitable[tuple[str, int]]]] = {
    "/chat/completions": read_chat,
    "/completions": read_text,
    "/responses": read_response,
    "/messages": read_message,
}


@pytest.mark.parametrize("path", BODIES)
async def test_the_sdks_read_the_same_with_keepalives(nano: Path, path: str, keepalives_sent: KeepaliveCount) -> None:
    async with slow_call(nano, keepalives_sent) as (harness, slow_down):
        fast, _ = await READERS[path](harness)
        keepalives_sent.number = 0
        slow_down()
        slow, read = await READERS[path](harness)
        await harness.drain()
        assert without_ids(slow) == without_ids(fast) and "see" in fast and re.search(r'b\\?": ?3', fast)
        assert keepalives_sent.number >= 4 and read == (keepalives_sent.number if path == "/responses" else 0)
        first, second = records(harness)
        assert first == second


@pytest.mark.parametrize("way", ["fast path", "FastAPI"])
@pytest.mark.parametrize("path", BODIES)
async def test_keepalives_are_between_events(
    nano: Path, path: str, way: str, monkeypatch: pytest.MonkeyPatch, keepalives_sent: KeepaliveCount
) -> None:
    if way == "FastAPI":
        monkeypatch.setattr(ServingApp, "__call__", route)
    body, keepalive = BODIES[path]
    async with slow_call(nano, keepalives_sent) as (harness, slow_down):
        url = harness.session["base_url"] + path
        fast = (await harness.http.post(url, json={**body, "stream": True})).content
        keepalives_sent.number = 0
        slow_down()
        slow = (await harness.http.post(url, json={**body, "stream": True})).content
        events = slow.split(b"\n\n")
        keepalives = [number for number, event in enumerate(events) if keepalive.fullmatch(event + b"\n\n")]
        assert len(keepalives) == len(keepalive.findall(slow)) == keepalives_sent.number >= 4
        assert (keepalives[0] == 0) == (path != "/responses"), "before the first event, but for the Responses API"
        assert len({number - count for count, number in enumerate(keepalives)}) >= 2, (
            "before the first token and after it"
        )
        assert without_ids(keepalive.sub(b"", slow).decode()) == without_ids(keepalive.sub(b"", fast).decode())


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_is_not_silent_has_no_keepalives(nano: Path, path: str) -> None:
    body, keepalive = BODIES[path]
    async with gateway_harness(nano) as harness:
        harness.set_replies(REPLY)
        reply = await harness.http.post(harness.session["base_url"] + path, json={**body, "stream": True})
        assert reply.content.count(b"\n\n") > 5 and not keepalive.search(reply.content)


async def test_a_whole_reply_has_no_keepalives(nano: Path, keepalives_sent: KeepaliveCount) -> None:
    async with gateway_harness(nano, keepalive_s=KEEPALIVE_S) as harness:
        hold = asyncio.Event()
        harness.source.replies = [Reply([*b"hi", EOS], hold=hold)]
        asking = asyncio.create_task(harness.http.post(harness.session["base_url"] + "/chat/completions", json=HI))
        await harness.source.started.wait()
        await asyncio.sleep(4 * KEEPALIVE_S)
        hold.set()
        assert (await asking).json()["choices"][0]["message"]["content"] == "hi"
        assert not keepalives_sent.number


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_leaves_between_keepalives_ends_its_call(nano: Path, path: str) -> None:
    body, keepalive = BODIES[path]
    async with gateway_harness(nano, keepalive_s=KEEPALIVE_S) as harness:
        harness.source.replies = [Reply([*b"hi", EOS], hold=asyncio.Event())]
        url, read = harness.session["base_url"] + path, b""
        async with (
            httpx.AsyncClient(timeout=30) as client,
            client.stream("POST", url, json={**body, "stream": True}) as reply,
        ):
            async for part in reply.aiter_bytes():
                read += part
                if len(keepalive.findall(read)) > 2:
                    break
        await asyncio.wait_for(harness.drain(), 10)
        (call,) = harness.source.calls
        assert harness.recorder.ends() == [(call.call_id, Finish.CANCELLED, {"text": "h"})]
        assert harness.source.aborted == [call.call_id]
        await asyncio.sleep(2 * KEEPALIVE_S)
        assert harness.gateway.table.running == 0
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "stream keepalive"]


START: dict[str, Any] = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json")],
}
STREAM_START = {**START, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
END = {"type": "http.response.body", "body": b"", "more_body": False}


def part_of(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


class Sent:
    """A send that keeps what it was given; `gate`, while it is clear, delays it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, message: Any) -> None:
        await self.gate.wait()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
async def test_no_keepalives_is_inside_an_event_however_it_is_split(size: int) -> None:
    events = b"data: 1\n\nevent: e\ndata: 2\n\ndata: [DONE]\n\n"
    sent = Sent()
    keepalives = StreamKeepalive(sent, "/v1/chat/completions", 0.01)
    await asyncio.sleep(0.03)
    assert not sent.messages, "before the headers"
    await keepalives(STREAM_START)
    for start in range(0, len(events), size):
        await keepalives(part_of(events[start : start + size]))
        await keepalives(part_of(b""))
        await asyncio.sleep(0.03)
    await keepalives(END)
    length = len(sent.messages)
    await asyncio.sleep(0.03)
    assert len(sent.messages) == length and sent.messages[-1] == END, "after the end"
    pieces = sent.body.split(b"\n\n")
    assert [piece for piece in pieces if piece + b"\n\n" != COMMENT] == events.split(b"\n\n")
    assert sent.body.count(COMMENT) >= (3 if size == 1 else 1)


async def test_a_keepalive_waits_like_a_message_and_overtakes_none() -> None:
    sent = Sent()
    keepalives = StreamKeepalive(sent, "/v1/messages", 0.02)
    await keepalives(STREAM_START)
    sent.gate.clear()
    sending = asyncio.create_task(keepalives(part_of(b"data: 1\n\n")))
    await asyncio.sleep(0.1)
    sent.gate.set()
    await sending
    assert sent.body == b"data: 1\n\n", "there was no silence: a message waited for the client"
    await asyncio.sleep(0.1)
    assert sent.body.startswith(b"data: 1\n\n" + PING)
    keepalives.stop()
    length = len(sent.messages)
    await asyncio.sleep(0.05)
    assert len(sent.messages) == length


async def test_what_is_no_stream_passes_as_it_is() -> None:
    sent = Sent()
    keepalives = StreamKeepalive(sent, "/v1/messages", 0.01)
    for message in (START, part_of(b"{")):
        await keepalives(message)
        await asyncio.sleep(0.03)
    await keepalives(END)
    assert sent.messages == [START, part_of(b"{"), END]


def test_a_keepalive_of_the_responses_api_repeats_the_last_number() -> None:
    events = EventCounter()
    assert keepalive_after("/v1/responses", events) is None, "an SDK expects response.created first"
    for part in (b"event: a\ndata: 0\n\neve", b"nt: b\ndata: 1\n", b"\n"):
        events.feed(part)
    keepalive = keepalive_after("/v1/responses", events)
    assert keepalive is not None
    found = KEEPALIVE.fullmatch(keepalive)
    assert found is not None and found[1] == b"1"
    events.feed(b"data: ")
    assert keepalive_after("/v1/responses", events) is None
