"""Gives a request of the gateway to FastAPI's routing, which its fast path leaves out."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI

from seamless_verl.gateway.fast_path import READ_BODY


async def route(app: FastAPI, scope: Any, receive: Any, send: Any) -> None:
    body: bytes | None = json.dumps(scope.pop(READ_BODY)).encode()
    replaced = (b"content-type", b"content-length")
    headers = [(name, value) for name, value in scope["headers"] if name not in replaced]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body or b"")).encode())]

    async def receive_body() -> Any:
        nonlocal body
        if body is None:
            return await receive()
        sent, body = body, None
        return {"type": "http.request", "body": sent, "more_body": False}

    await FastAPI.build_middleware_stack(app)({**scope, "headers": headers, "app": app}, receive_body, send)
