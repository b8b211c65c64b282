"""The straight way to vLLM's handlers: what FastAPI does for every request, without what it does for none of ours.

A body that passes the model of its route goes to the route's own function at once; one that does not goes to
FastAPI, which says why. The reply is the function's in either case, or what FastAPI makes of an error of its.

Invariants:
- A body is checked by FastAPI's own field of the route, and a straight reply equals the routed one byte for byte.
- When the client goes away the function is cancelled, or the sending of what it returned.
- A request that the server cancels has no reply of its function's: its client may send it again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seamless_verl.gateway.http import COUNTING, POSTED, ReplayedBody

READ = "seamless_verl.read"  # the scope's key for a body that was read: what it says, and its bytes
FAILED = "seamless_verl.failed"  # and for what a function raised
PATHS = POSTED | {COUNTING}

Function = Callable[..., Awaitable[Any]]


class FastPath:
    """Stands before FastAPI; what it cannot do itself, and what a function raises, goes to `whole`, all of FastAPI."""

    def __init__(self, whole: ASGIApp, routes: list[Any]) -> None:
        self._whole = whole
        ours = (one for one in routes if isinstance(one, APIRoute) and one.path in PATHS)
        self._routes = {route.path: (route.body_field, _uncancelled(route.endpoint)) for route in ours}
        assert self._routes.keys() == PATHS, f"routes for {sorted(PATHS)}, found {sorted(self._routes)}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read: ReadBody = scope[READ]
        field, function = self._routes[scope["path"]]
        said = read.said()
        try:
            asked, errors = field.validate(said, {}, loc=("body",))
        except Exception:  # whatever it is, FastAPI meets it again and turns it into a reply
            errors = [said]
        if errors:
            await self._whole(read.typed(scope), ReplayedBody(read.data(), receive), send)
            return
        begun = StartedResponse(send)
        try:
            await self.run(function, asked, Request(scope, receive, begun), begun)
        except Exception as error:  # FastAPI turns it into a reply, where there is none yet
            if begun.yet:
                raise
            await self._whole({**scope, FAILED: error}, receive, send)

    async def run(self, function: Function, asked: Any, request: Request, send: Send) -> None:
        """Gives a checked body to its route's function, and its answer to the client while there is one."""
        await while_connected(request.receive, lambda: _answered(function, asked, request, send))


class ReadBody:
    """A body that was read, with what the session decides in it."""

    def __init__(self, body: Mapping[str, Any], decided: Mapping[str, Any], raw: bytes) -> None:
        self._body, self._decided, self._raw = body, decided, raw

    def said(self) -> dict[str, Any]:
        """One's own copy: checking writes into it."""
        return {**self._body, **self._decided}

    def data(self) -> bytes:
        """From the raw bytes, for what is inside of `said` may have been written to."""
        return json.dumps({**json.loads(self._raw), **self._decided}).encode()

    def typed(self, scope: Scope) -> Scope:
        """The scope of these bytes."""
        length = str(len(self.data())).encode()
        return {**scope, "headers": [*scope["headers"], (b"content-length", length)]}


class StartedResponse:
    """A send that knows whether a reply has begun."""

    def __init__(self, send: Send) -> None:
        self._send, self.yet = send, False

    async def __call__(self, message: Message) -> None:
        self.yet = True
        await self._send(message)


class ServingApp(FastAPI):
    """FastAPI, and the straight way before it for bodies that were read."""

    straight: FastPath

    def build_middleware_stack(self) -> ASGIApp:
        stack: Any = super().build_middleware_stack()
        catching = stack
        while not isinstance(catching, ExceptionMiddleware):
            catching = catching.app
        catching.app = _raising(catching.app)
        self.straight = FastPath(stack, self.router.routes)
        whole: ASGIApp = stack
        return whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if READ not in scope:
            await super().__call__(scope, receive, send)
            return
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        await self.straight({**scope, "app": self}, receive, send)


def _raising(routed: ASGIApp) -> ASGIApp:
    """Raises, inside of FastAPI's handling of errors, what a request failed with outside of it."""

    async def routed_or_raised(scope: Scope, receive: Receive, send: Send) -> None:
        if (error := scope.get(FAILED)) is not None:
            raise error
        await routed(scope, receive, send)

    return routed_or_raised


async def while_connected(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Does the work, which is cancelled when the client goes away."""
    me, gone = asyncio.current_task(), False
    assert me is not None

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        me.cancel()

    watching = asyncio.create_task(watch())
    try:
        await work()
    except asyncio.CancelledError:
        if not gone or me.uncancel():  # somebody else's
            raise
    finally:
        watching.cancel()


async def _answered(function: Function, asked: Any, request: Request, send: Send) -> None:
    response: Response = await function(asked, raw_request=request)
    if (me := asyncio.current_task()) is not None and me.cancelling():
        raise asyncio.CancelledError  # vLLM makes it a 400, which no SDK sends again: but its client is still there
    if isinstance(response, StreamingResponse):
        await response.stream_response(send)  # whoever called listens for the client already
    else:
        await response(request.scope, request.receive, send)


def _uncancelled(endpoint: Any) -> Function:
    """The route's function inside vLLM's `with_cancellation`, whose work is done here."""
    inner: Function = endpoint.__wrapped__
    return inner
