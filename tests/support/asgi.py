"""The gateway's middleware, and requests to it, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

from seamless_verl.gateway.admin import Admin
from seamless_verl.gateway.middleware import GatewaySettings, SessionMiddleware
from seamless_verl.gateway.sessions import SessionTable
from support.journal import NullRecorder

ADMIN_KEY = "the admin's"


async def ask(app: Any, path: str, body: bytes = b"{}", *, method: str = "POST", key: str = "", retry: int = 0) -> Any:
    """The status and the body of the reply, for which the client waits; `key` is sent as a bearer token."""
    headers = {"x-stainless-retry-count": str(retry)} | ({"authorization": f"Bearer {key}"} if key else {})
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    sent: list[Any] = []
    requests = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        return next(requests, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "method": method, "path": path, "headers": pairs}, receive, send)
    return int(sent[0]["status"]), b"".join(message["body"] for message in sent[1:])


async def no_calls(session_id: str) -> None:
    """Cancels the calls of a session that has none."""


def middleware_before(app: Any, table: SessionTable, *, settings: Any = (), **options: Any) -> Any:
    """The middleware; `options` in the place of collaborators that keep nothing."""
    collaborators: dict[str, Any] = {"admin": Admin(table, NullRecorder(), cancel=no_calls), "models": None}
    collaborators |= {"on_refusal": lambda *refusal: None, **options}
    return SessionMiddleware(app, GatewaySettings("model", ADMIN_KEY, **dict(settings)), table=table, **collaborators)
