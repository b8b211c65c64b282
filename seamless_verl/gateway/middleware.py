"""The door: every request is known by its session's key before vLLM's serving classes see it.

Invariants:
- What passes runs in one open session, within its quotas, and is numbered in it.
- What is refused is told so in the shape of the API that was called; a client never sees a traceback.
- A place in the session is given back when the request ends, however it ends.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from seamless_verl.gateway.admin import Admin
from seamless_verl.gateway.api_errors import Api, ApiError, ErrorCode
from seamless_verl.gateway.fast_path import READ, ReadBody
from seamless_verl.gateway.http import (
    GENERATING,
    REWARD,
    Address,
    Body,
    ClientGoneError,
    DisconnectWatch,
    ResponseWatch,
    address_of,
    checked_digest,
    header_key,
    parse_body,
    read_body,
    send_json,
    send_refusal,
)
from seamless_verl.gateway.request_context import CURRENT, RequestContext
from seamless_verl.gateway.retries import Attempt
from seamless_verl.gateway.sessions import Session, SessionTable

logger = logging.getLogger(__name__)

MAX_BODY = 32 << 20  # bytes: near 8 million tokens of text


class SessionMiddleware:
    """ASGI: admits to `app`, and serves the admin API and rewards itself."""

    def __init__(
        self, app: ASGIApp, *, table: SessionTable, admin: Admin, admin_key: str, max_body: int = MAX_BODY
    ) -> None:
        self._app, self._table, self._admin, self._max_body = app, table, admin, max_body
        self._admin_hash = hashlib.sha256(admin_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        address = address_of(scope["path"])
        try:
            await self._serve(scope, receive, send, address)
        except ApiError as refusal:
            await send_refusal(send, refusal, address.api)
        except ClientGoneError:
            return

    async def _serve(self, scope: Scope, receive: Receive, send: Send, address: Address) -> None:
        headers = Headers(scope=scope)
        if address.path == "/health":
            await send_json(send, 200, {"status": "ok", "running": self._table.running})
        elif address.path.startswith("/admin/"):
            self._check_admin(headers)
            body = await self._body(scope, receive) if scope["method"] == "POST" else {}
            await _answer(send, self._admin.handle(scope["method"], address.path, body))
        else:
            await self._enter(scope, receive, send, address, headers)

    async def _enter(self, scope: Scope, receive: Receive, send: Send, address: Address, headers: Headers) -> None:
        session = self._session(address, headers)
        address.check(scope["method"])
        inner = {**scope, "path": address.path, "raw_path": address.path.encode()}
        if address.of_models:
            await self._app(inner, receive, send)
            return
        raw = await read_body(scope, receive, self._max_body)
        body = parse_body(raw)
        if address.path == REWARD:
            await _answer(send, self._admin.reward(session, body))
            return
        await self._call(inner, receive, send, address, session, body, raw, headers)

    async def _call(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        address: Address,
        session: Session,
        body: Body,
        raw: bytes,
        headers: Headers,
    ) -> None:
        digest = checked_digest(address.path, body)
        generating = address.path in GENERATING
        earlier = _repeated(session, digest, headers) if generating else None
        calls = _choices(body) if generating else 0
        try:
            with self._table.admitted(session, calls, new_turn=generating and not earlier):
                attempt = earlier or _attempt(session, digest, headers)
                repeats = earlier is not None
                exchange = RequestContext(session, session.requests, address.path, body, digest, attempt, repeats)
                # Said in the body too: greedy sampling, once parsed, has lost the other parameters.
                decided = session.sampling.chosen(body) if generating else {}
                given = {**_typed(scope), READ: ReadBody(body, decided, raw)}
                await self._pass(given, DisconnectWatch(receive), send, address.api, exchange)
        finally:
            if earlier is not None:  # one that was refused, or whose connection broke too, comes again
                earlier.joined = False

    async def _pass(
        self, scope: Scope, receive: DisconnectWatch, send: Send, api: Api, exchange: RequestContext
    ) -> None:
        watched = ResponseWatch(send, api)
        token = CURRENT.set(exchange)
        try:
            await self._app(scope, receive, watched)
        finally:
            CURRENT.reset(token)
            attempts = exchange.session.attempts
            if watched.complete and not receive.gone:
                attempts.sent(exchange.attempt)
            elif not exchange.attempt.repeatable:
                attempts.forget(exchange.attempt)

    def _session(self, address: Address, headers: Headers) -> Session:
        """The session of the address, else of the header; a header with another session's key is refused."""
        given = header_key(headers)
        if address.key is None:
            return self._table.by_key(given)
        session = self._table.by_key(address.key)
        if given is not None and self._table.knows(given) not in (None, session):
            raise ApiError(ErrorCode.FOREIGN_KEY, "The key in the header is of another session than the address")
        return session

    def _check_admin(self, headers: Headers) -> None:
        given = header_key(headers)
        if given is None:
            raise ApiError(ErrorCode.MISSING_KEY, "No admin key. Send it as a bearer token or as x-api-key")
        if not hmac.compare_digest(hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest(), self._admin_hash):
            raise ApiError(ErrorCode.UNKNOWN_KEY, "This is not the admin key")

    async def _body(self, scope: Scope, receive: Receive) -> Body:
        return parse_body(await read_body(scope, receive, self._max_body))


async def _answer(send: Send, work: Awaitable[dict[str, Any]]) -> None:
    """Sends what the work gives; what breaks in it (the record, for one) is logged here and told as a 500."""
    try:
        body = await work
    except ApiError:
        raise
    except Exception as error:
        logger.exception("admin request failed")
        message = f"it could not be done: {type(error).__name__}"
        told = {"message": message, "type": "server_error", "param": None, "code": "server_error"}
        await send_json(send, 500, {"error": told})
    else:
        await send_json(send, 200, body)


def _repeated(session: Session, digest: str, headers: Headers) -> Attempt | None:
    retried = headers.get("x-stainless-retry-count", "0")
    retry = retried.isdecimal() and int(retried) > 0
    return session.attempts.repeated(digest, key=headers.get("idempotency-key"), retry=retry)


def _attempt(session: Session, digest: str, headers: Headers) -> Attempt:
    return session.attempts.begin(digest, headers.get("idempotency-key"), session.requests)


def _choices(body: Mapping[str, Any]) -> int:
    """Calls a request makes: its choices, for each of its prompts. What is no number is for vLLM to refuse."""
    choices, prompt = body.get("n"), body.get("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    each = choices if isinstance(choices, int) and choices > 0 else 1
    return each * (len(prompt) if several and isinstance(prompt, list) else 1)


def _typed(scope: Scope) -> Scope:
    """The scope of a body that was read, and is JSON whatever its sender called it."""
    replaced = (b"content-type", b"content-length")
    kept = [(name, value) for name, value in scope["headers"] if name not in replaced]
    return {**scope, "headers": [*kept, (b"content-type", b"application/json")]}
