"""The fast path to vLLM's handlers: it skips the work of FastAPI that none of our requests needs.

A body that passes the model of its route is given to the route's own function at once. Any other body is given to
FastAPI, which says what is wrong with it. The response is the function's, or what FastAPI makes of its error.

Invariants:
- A body is validated by FastAPI's own field of the route; the response is that of FastAPI's routing, byte for byte.
- When the client disconnects, the function is cancelled, or the sending of its response.
- A request that the server cancels gets no response from its function, so that its client may send it again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seamless_verl.gateway.http import COUNT_TOKENS_PATH, GENERATION_PATHS, Body, parse_request
from seamless_verl.gateway.http_responses import ReplayedBody

READ_BODY = "seamless_verl.read_body"  # the scope's key of a ReadBody
ROUTE_ERROR = "seamless_verl.route_error"  # the scope's key of an error that a route's function raised
FAST_PATHS = GENERATION_PATHS | {COUNT_TOKENS_PATH}

RouteFunction = Callable[..., Awaitable[Any]]


class FastPath:
    """Runs routes of `FAST_PATHS`; invalid bodies and errors of the functions go to `fallback`, the FastAPI app."""

    def __init__(self, fallback: ASGIApp, routes: list[Any]) -> None:
        self._fallback = fallback
        served = (route for route in routes if isinstance(route, APIRoute) and route.path in FAST_PATHS)
        self._routes = {route.path: (route.body_field, _without_cancellation(route.endpoint)) for route in served}
        assert self._routes.keys() == FAST_PATHS, f"routes for {sorted(FAST_PATHS)}, found {sorted(self._routes)}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: ReadBody = scope[READ_BODY]
        field, function = self._routes[scope["path"]]
        values = body.values()
        try:
            model, errors = field.validate(values, {}, loc=("body",))
        except Exception:  # FastAPI gets the same error again, and turns it into a response
            errors = [values]
        if errors:
            await self._fallback(body.with_length(scope), ReplayedBody(body.encode(), receive), send)
            return
        response = StartedResponse(send)
        try:
            await self.run(function, model, Request(scope, receive, response), response)
        except Exception as error:  # FastAPI turns it into a response, unless one has begun
            if response.started:
                raise
            await self._fallback({**scope, ROUTE_ERROR: error}, receive, send)

    async def run(self, function: RouteFunction, model: Any, request: Request, send: Send) -> None:
        """Calls a route's function with a valid body, and sends its response, until the client disconnects."""
        await run_while_connected(request.receive, lambda: _respond(function, model, request, send))


class ReadBody:
    """A parsed body, as `change` changes it."""

    def __init__(self, body: Body, change: Callable[[Body], Body], raw: bytes) -> None:
        self._body, self._change, self._raw = body, change, raw

    def values(self) -> dict[str, Any]:
        """A new dict each time: validation writes into it."""
        return self._change(self._body)

    def encode(self) -> bytes:
        """As JSON; from the raw bytes, for validation may have written into nested values."""
        return json.dumps(self._change(parse_request(self._raw))).encode()

    def with_length(self, scope: Scope) -> Scope:
        """The scope with the length of the encoded body."""
        length = str(len(self.encode())).encode()
        return {**scope, "headers": [*scope["headers"], (b"content-length", length)]}


class StartedResponse:
    """A send that remembers whether a response has begun."""

    def __init__(self, send: Send) -> None:
        self._send, self.started = send, False

    async def __call__(self, message: Message) -> None:
        self.started = True
        await self._send(message)


class ServingApp(FastAPI):
    """FastAPI with the fast path before it, for requests whose body was read."""

    fast_path: FastPath

    def build_middleware_stack(self) -> ASGIApp:
        stack: Any = super().build_middleware_stack()
        layer = stack
        while not isinstance(layer, ExceptionMiddleware):
            layer = layer.app
        layer.app = _raising_route_errors(layer.app)
        self.fast_path = FastPath(stack, self.router.routes)
        app: ASGIApp = stack
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if READ_BODY not in scope:
            await super().__call__(scope, receive, send)
            return
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        await self.fast_path({**scope, "app": self}, receive, send)


def _raising_route_errors(app: ASGIApp) -> ASGIApp:
    """Raises an error of the fast path again, inside FastAPI's error handling."""

    async def raise_or_route(scope: Scope, receive: Receive, send: Send) -> None:
        if (error := scope.get(ROUTE_ERROR)) is not None:
            raise error
        await app(scope, receive, send)

    return raise_or_route


async def run_while_connected(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Does the work; cancels it when the client disconnects."""
    task, disconnected = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        await work()
    except asyncio.CancelledError:
        if not disconnected or task.uncancel():  # cancelled from elsewhere
            raise
    finally:
        watcher.cancel()


async def _respond(function: RouteFunction, model: Any, request: Request, send: Send) -> None:
    response: Response = await function(model, raw_request=request)
    if (task := asyncio.current_task()) is not None and task.cancelling():
        raise asyncio.CancelledError  # vLLM answers 400, which no SDK retries; but the client is still connected
    if isinstance(response, StreamingResponse):
        await response.stream_response(send)  # run_while_connected already watches for a disconnect
    else:
        await response(request.scope, request.receive, send)


def _without_cancellation(endpoint: Any) -> RouteFunction:
    """The function inside vLLM's `with_cancellation`, whose work is done here."""
    inner: RouteFunction = endpoint.__wrapped__
    return inner
