"""What the gateway itself sends: JSON, errors, the list of models, and keepalives within streams.

vLLM's responses pass through watchers, which give its errors the form of the API that was called. A streamed reply gets
keepalives while its call gives no event: a call may wait for a weight update or its place in a queue, and clients end a
stream that is silent for some minutes.

Invariants of keepalives:
- One is sent after a silence and between whole events only: after the response's headers, and before its end.
- The messages of the application pass unchanged, in their order. A keepalive takes no number of an event.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Send

from seamless_verl.gateway.api_errors import (
    OVERFLOW_STATUS,
    Api,
    ApiError,
    ErrorCode,
    anthropic_error,
    failed_response_events,
)
from seamless_verl.gateway.http import MESSAGES_PATH, RESPONSES_PATH
from seamless_verl.gateway.request_context import RequestContext

KEEPALIVE_S = 15.0  # clients and proxies wait for 30 seconds at least
PING = b'event: ping\ndata: {"type": "ping"}\n\n'  # Anthropic's own; its SDKs skip it, also before message_start
COMMENT = b": keepalive\n\n"
END_OF_EVENT = b"\n\n"
OWNER = "vllm"


async def send_json(send: Send, status: int, body: object, retry_after: int | None = None) -> None:
    data = json.dumps(body).encode()
    fields = {"content-type": "application/json", "content-length": str(len(data))}
    if retry_after is not None:
        fields["retry-after"] = str(retry_after)
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def send_error(send: Send, error: ApiError, api: Api) -> None:
    await send_json(send, error.status, error.body(api), error.retry_after)


class DisconnectWatch:
    """A receive that remembers whether the client has disconnected."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.disconnected = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.disconnected |= message["type"] == "http.disconnect"
        return message


class ResponseWatch:
    """A send that remembers whether a successful response was sent in full.

    It gives vLLM's errors the form of the API that was called; `on_error` gets the status and message of each.
    """

    def __init__(self, send: Send, api: Api, context: RequestContext, on_error: Callable[[int, str], None]) -> None:
        self._send, self._api, self._context, self._on_error = send, api, context, on_error
        self._error_start: Message | None = None
        self._error_body: list[bytes] = []
        self.started = self.complete = False

    @property
    def error_status(self) -> int | None:
        """The status of the error that was the response; None without one."""
        return None if self._error_start is None else int(self._error_start["status"])

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._error_start = message
            return
        self.started |= self._error_start is None
        if self._error_start is not None:
            self._error_body.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._send_error(self._error_start, b"".join(self._error_body))
            return
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True

    async def _send_error(self, start: Message, data: bytes) -> None:
        status, message, overflow = start["status"], _error_message(data), self._context.overflow
        if overflow is not None:
            status, message = OVERFLOW_STATUS, overflow.message
        self._on_error(status, message)
        if self._api is Api.ANTHROPIC:
            text = message if overflow is None else overflow.anthropic_message
            await send_json(self._send, status, anthropic_error(status, text))
        elif overflow is None:
            await self._send(start)
            await self._send({"type": "http.response.body", "body": data})
        elif self._context.path == RESPONSES_PATH and self._context.body.get("stream"):
            await self._send_failed_response()
        else:
            await send_json(self._send, status, overflow.openai_body(self._context.path))

    async def _send_failed_response(self) -> None:
        model = str(self._context.body.get("model", ""))
        data = failed_response_events(f"resp_{self._context.digest}", model, int(time.time()))
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data})


def _error_message(data: bytes) -> str:
    """The message of an error in either API's form, or the whole text."""
    try:
        body: Any = json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error) if isinstance(error, dict) else error or body)


@dataclass(frozen=True)
class ModelList:
    """The names of the one model that is served, in OpenAI's and in Anthropic's form."""

    names: Sequence[str]
    context_length: int  # tokens
    started_at: float  # seconds since the epoch
    strict: bool = False  # it has no other names

    def list(self, api: Api) -> dict[str, Any]:
        data = [self._entry(name, api) for name in self.names]
        if api is Api.ANTHROPIC:
            return {"data": data, "has_more": False, "first_id": self.names[0], "last_id": self.names[-1]}
        return {"object": "list", "data": data}

    def describe(self, name: str, api: Api) -> dict[str, Any]:
        """One name, whatever it is unless the list is strict; raises ApiError."""
        if self.strict and name not in self.names:
            raise ApiError(ErrorCode.NO_MODEL, f"The model `{name}` does not exist.", param="model")
        return self._entry(name, api)

    def _entry(self, name: str, api: Api) -> dict[str, Any]:
        if api is Api.ANTHROPIC:
            created = datetime.fromtimestamp(int(self.started_at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            lengths = {"max_input_tokens": self.context_length, "max_tokens": self.context_length}
            return {"type": "model", "id": name, "display_name": name, "created_at": created, **lengths}
        known = {"id": name, "object": "model", "created": int(self.started_at), "owned_by": OWNER}
        return {**known, "root": self.names[0], "parent": None, "max_model_len": self.context_length}


class StreamKeepalive:
    """A send that adds keepalives after `interval` seconds of silence to a stream of events of the API at `path`."""

    def __init__(self, send: Send, path: str, interval: float = KEEPALIVE_S) -> None:
        self._send, self._path, self._interval = send, path, interval
        self._lock = asyncio.Lock()  # a keepalive does not overtake a message that waits for a slow client
        self._events = EventCounter()
        self._due = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, message: Message) -> None:
        async with self._lock:
            await self._send(message)
            self._note(message)

    def stop(self) -> None:
        """The response has ended, or is given up."""
        if self._task is not None:
            self._task.cancel()

    def _note(self, message: Message) -> None:
        self._due = time.monotonic() + self._interval
        if message["type"] == "http.response.start":
            if Headers(raw=message.get("headers", [])).get("content-type", "").startswith("text/event-stream"):
                self._task = asyncio.create_task(self._run(), name="stream keepalive")
        elif message.get("more_body", False):
            self._events.feed(message.get("body", b""))
        else:
            self.stop()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._due - time.monotonic())  # a silence is a time, and nothing tells of it
            async with self._lock:
                if time.monotonic() < self._due:  # a message was sent meanwhile
                    continue
                keepalive = keepalive_after(self._path, self._events)
                if keepalive is not None:
                    await self._send({"type": "http.response.body", "body": keepalive, "more_body": True})
                self._due = time.monotonic() + self._interval


class EventCounter:
    """Counts the whole events of a stream, whose parts may be split anywhere.

    `between`: the stream so far ends with a whole event, or is empty.
    """

    def __init__(self) -> None:
        self.count, self.between = 0, True
        self._last = b""  # the last byte, where it may begin the end of an event

    def feed(self, part: bytes) -> None:
        if part:
            text = self._last + part
            self.count += text.count(END_OF_EVENT)
            self.between = text.endswith(END_OF_EVENT)
            self._last = b"" if self.between else text[-1:]


def keepalive_after(path: str, events: EventCounter) -> bytes | None:
    """The keepalive that may follow these events; None where none may.

    OpenAI's Responses API sends `keepalive` itself, and some clients need a number in each event: it repeats the last,
    of vLLM's from 0. OpenAI's SDK accepts nothing before `response.created`, which comes at once.
    """
    if not events.between:
        return None
    if path == MESSAGES_PATH:
        return PING
    if path != RESPONSES_PATH:
        return COMMENT
    if not events.count:
        return None
    data = json.dumps({"type": "keepalive", "sequence_number": events.count - 1})
    return f"event: keepalive\ndata: {data}\n\n".encode()
