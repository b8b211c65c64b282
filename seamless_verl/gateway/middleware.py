"""Session middleware: it admits each request to the session of its key before vLLM's serving classes see it.

Invariants:
- A request that passes runs in one open session, within its quotas, and is numbered in it.
- An error has the form of the API that was called; a client never sees a traceback.
- A request's place in its session is returned when the request ends, in whatever way.
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
from seamless_verl.gateway.fast_path import READ_BODY, ReadBody
from seamless_verl.gateway.http import (
    GENERATION_PATHS,
    REWARD_PATH,
    Address,
    Body,
    ClientGoneError,
    DisconnectWatch,
    ResponseWatch,
    digest_request,
    key_from_headers,
    parse_address,
    parse_body,
    read_body,
    send_error,
    send_json,
)
from seamless_verl.gateway.request_context import CURRENT, RequestContext
from seamless_verl.gateway.retries import Attempt
from seamless_verl.gateway.session import Session
from seamless_verl.gateway.sessions import SessionTable

logger = logging.getLogger(__name__)

MAX_BODY = 32 << 20  # bytes: near 8 million tokens of text


class SessionMiddleware:
    """ASGI middleware: it admits requests to `app`, and serves the admin API and rewards itself."""

    def __init__(
        self, app: ASGIApp, *, table: SessionTable, admin: Admin, admin_key: str, max_body: int = MAX_BODY
    ) -> None:
        self._app, self._table, self._admin, self._max_body = app, table, admin, max_body
        self._admin_hash = hashlib.sha256(admin_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        address = parse_address(scope["path"])
        try:
            await self._serve(scope, receive, send, address)
        except ApiError as error:
            await send_error(send, error, address.api)
        except ClientGoneError:
            return

    async def _serve(self, scope: Scope, receive: Receive, send: Send, address: Address) -> None:
        headers = Headers(scope=scope)
        if address.path == "/health":
            await send_json(send, 200, {"status": "ok", "running": self._table.running})
        elif address.path.startswith("/admin/"):
            self._check_admin_key(headers)
            body = await self._read_json(scope, receive) if scope["method"] == "POST" else {}
            await _send_result(send, self._admin.handle(scope["method"], address.path, body))
        else:
            await self._serve_session(scope, receive, send, address, headers)

    async def _serve_session(
        self, scope: Scope, receive: Receive, send: Send, address: Address, headers: Headers
    ) -> None:
        session = self._find_session(address, headers)
        address.check(scope["method"])
        inner_scope = {**scope, "path": address.path, "raw_path": address.path.encode()}
        if address.is_models:
            await self._app(inner_scope, receive, send)
            return
        raw = await read_body(scope, receive, self._max_body)
        body = parse_body(raw)
        if address.path == REWARD_PATH:
            await _send_result(send, self._admin.reward(session, body))
            return
        await self._serve_request(inner_scope, receive, send, address, session, body, raw, headers)

    async def _serve_request(
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
        digest = digest_request(address.path, body)
        generates = address.path in GENERATION_PATHS
        retried = _find_attempt(session, digest, headers) if generates else None
        calls = _count_calls(body) if generates else 0
        try:
            with self._table.admit(session, calls, new_turn=generates and not retried):
                attempt = retried or _begin_attempt(session, digest, headers)
                is_retry = retried is not None
                context = RequestContext(session, session.requests, address.path, body, digest, attempt, is_retry)
                # In the body too, not only in the parsed parameters: those of greedy sampling have lost the others.
                overrides = session.sampling.resolve(body) if generates else {}
                inner_scope = {**_with_json_type(scope), READ_BODY: ReadBody(body, overrides, raw)}
                await self._forward(inner_scope, DisconnectWatch(receive), send, address.api, context)
        finally:
            if retried is not None:  # if this retry was refused, or lost its connection, another one follows
                retried.claimed = False

    async def _forward(
        self, scope: Scope, receive: DisconnectWatch, send: Send, api: Api, context: RequestContext
    ) -> None:
        response = ResponseWatch(send, api)
        token = CURRENT.set(context)
        try:
            await self._app(scope, receive, response)
        finally:
            CURRENT.reset(token)
            attempts = context.session.attempts
            if response.complete and not receive.disconnected:
                attempts.mark_sent(context.attempt)
            elif not context.attempt.repeatable:
                attempts.remove(context.attempt)

    def _find_session(self, address: Address, headers: Headers) -> Session:
        """The session of the address, or else of the header; raises ApiError when they name two sessions."""
        header_key = key_from_headers(headers)
        if address.key is None:
            return self._table.by_key(header_key)
        session = self._table.by_key(address.key)
        if header_key is not None and self._table.find_by_key(header_key) not in (None, session):
            raise ApiError(ErrorCode.FOREIGN_KEY, "The key in the header is of another session than the address")
        return session

    def _check_admin_key(self, headers: Headers) -> None:
        key = key_from_headers(headers)
        if key is None:
            raise ApiError(ErrorCode.MISSING_KEY, "No admin key. Send it as a bearer token or as x-api-key")
        if not hmac.compare_digest(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest(), self._admin_hash):
            raise ApiError(ErrorCode.UNKNOWN_KEY, "This is not the admin key")

    async def _read_json(self, scope: Scope, receive: Receive) -> Body:
        return parse_body(await read_body(scope, receive, self._max_body))


async def _send_result(send: Send, work: Awaitable[dict[str, Any]]) -> None:
    """Sends the result of an admin request; an unexpected error, as of the journal, is logged and sent as a 500."""
    try:
        body = await work
    except ApiError:
        raise
    except Exception as error:
        logger.exception("admin request failed")
        message = f"it could not be done: {type(error).__name__}"
        details = {"message": message, "type": "server_error", "param": None, "code": "server_error"}
        await send_json(send, 500, {"error": details})
    else:
        await send_json(send, 200, body)


def _find_attempt(session: Session, digest: str, headers: Headers) -> Attempt | None:
    count = headers.get("x-stainless-retry-count", "0")
    retry = count.isdecimal() and int(count) > 0
    return session.attempts.find(digest, key=headers.get("idempotency-key"), retry=retry)


def _begin_attempt(session: Session, digest: str, headers: Headers) -> Attempt:
    return session.attempts.begin(digest, headers.get("idempotency-key"), session.requests)


def _count_calls(body: Mapping[str, Any]) -> int:
    """The request's calls: its choices, for each of its prompts. Values of a wrong type are for vLLM to refuse."""
    choices, prompt = body.get("n"), body.get("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    each = choices if isinstance(choices, int) and choices > 0 else 1
    return each * (len(prompt) if several and isinstance(prompt, list) else 1)


def _with_json_type(scope: Scope) -> Scope:
    """The scope with JSON as content type, which the body was found to be, and without a length."""
    replaced = (b"content-type", b"content-length")
    headers = [(name, value) for name, value in scope["headers"] if name not in replaced]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}
