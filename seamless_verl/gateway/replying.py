"""Sending: refusals in the caller's shape, and what vLLM answers, watched and where need be reshaped."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Message, Receive, Send

from seamless_verl.gateway.refusals import Api, Refusal, answer, anthropic_error


async def send_json(send: Send, status: int, body: object, headers: dict[str, str] | None = None) -> None:
    data = json.dumps(body).encode()
    fields = {"content-type": "application/json", "content-length": str(len(data))} | (headers or {})
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": data})


async def send_refusal(send: Send, refusal: Refusal, api: Api) -> None:
    reply = answer(refusal, api)
    await send_json(send, reply.status, reply.body, reply.headers)


class Replayed:
    """A receive that gives a body that was read already, and then what comes after it."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()


class Listened:
    """A receive that knows whether the client is gone."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.gone = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.gone |= message["type"] == "http.disconnect"
        return message


class Watched:
    """A send that knows whether a good reply went out in full, and gives Anthropic's errors Anthropic's shape."""

    def __init__(self, send: Send, api: Api) -> None:
        self._send, self._api = send, api
        self._error: Message | None = None
        self._parts: list[bytes] = []
        self.complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400 and self._api is Api.ANTHROPIC:
            self._error = message
            return
        if self._error is not None:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._reshaped(self._error["status"], b"".join(self._parts))
            return
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True

    async def _reshaped(self, status: int, data: bytes) -> None:
        await send_json(self._send, status, anthropic_error(status, _told(data)))


def _told(data: bytes) -> str:
    """The message of an error in either shape, or all of it."""
    try:
        body: Any = json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error) if isinstance(error, dict) else error or body)
