"""Keepalives: what a streamed reply sends while its call gives no event, so that the client does not give it up.

A call may wait for a weight update, a hand-over or its place in a queue, and its tool calls are sent at its end.
Clients end a stream that is silent for some minutes, and ask again.

Invariants:
- A keepalive is sent between whole events only: after the response's headers, and before its end.
- The messages of the application pass unchanged, in their order. A keepalive takes no number of an event.
- A keepalive is sent after a silence only: no message was sent, and none waits for a slow client.
- After `stop` nothing is sent.
"""

from __future__ import annotations

import asyncio
import json
import time

from starlette.datastructures import Headers
from starlette.types import Message, Send

from seamless_verl.gateway.http import MESSAGES_PATH, RESPONSES_PATH

KEEPALIVE_S = 15.0  # clients and proxies wait for 30 seconds at least
PING = b'event: ping\ndata: {"type": "ping"}\n\n'  # Anthropic's own; its SDKs skip it, also before message_start
COMMENT = b": keepalive\n\n"
END_OF_EVENT = b"\n\n"


class StreamKeepalive:
    """A send that adds keepalives to a stream of events; other responses pass as they are.

    `path` is that of the API; `interval` in seconds of silence. Owned state: the task that sends the keepalives.
    """

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

    OpenAI's Responses API sends `keepalive` itself, and some clients need a number in each event. vLLM numbers events
    from 0, and the keepalive repeats the last number. OpenAI's SDK accepts nothing before `response.created`, which
    comes at once.
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
