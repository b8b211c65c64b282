"""Session middleware: it admits each request to the session of its key before vLLM's serving classes see it.

Invariants:
- A request that passes runs in one open session, within its quotas, and is numbered in it.
- An error has the form of the API that was called; a client never sees a traceback.
- A request's place in its session is returned when the request ends, in whatever way.
- What is recorded of refusals is bounded, for each session and for all programs outside of the run together.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeAlias

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from seamless_verl.errors import SeamlessError
from seamless_verl.gateway.admin import Admin
from seamless_verl.gateway.api_errors import Api, ApiError, ErrorCode
from seamless_verl.gateway.fast_path import READ_BODY, ReadBody
from seamless_verl.gateway.http import (
    GENERATION_PATHS,
    MODELS_PATH,
    RESPONSES_PATH,
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
    parse_request,
    read_body,
    send_error,
    send_json,
)
from seamless_verl.gateway.keepalive import KEEPALIVE_S, StreamKeepalive
from seamless_verl.gateway.models import ModelList
from seamless_verl.gateway.protocols import OutsideApi
from seamless_verl.gateway.request_context import CURRENT, RequestContext
from seamless_verl.gateway.request_rules import MAX_BODY, RequestRules, changes_for, count_calls
from seamless_verl.gateway.retries import Attempt, is_retried
from seamless_verl.gateway.session import Session
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.gateway.stored_responses import find_previous, find_referenced, stored_response

logger = logging.getLogger(__name__)

COUNTED = (
    *("gateway/requests_refused", "gateway/hosted_tools_dropped", "gateway/media_replaced", "gateway/schemas_dropped"),
)
MAX_REFUSED = 256  # refusals of one session that are recorded as of a program outside of the run,
MAX_REFUSED_OUTSIDE = 16_384  # and of all requests without an open session: programs may repeat a mistake for ever
OnRefusal: TypeAlias = Callable[[Session, str, int, str], None]
"""Gets the session, the path, the status and the message of a request that got an error."""


class SessionMiddleware:
    """ASGI middleware: it admits requests to `app`, and serves the admin API and rewards itself.

    `takes_namespaces`: the app's Responses API serves the functions of a `namespace` tool.
    `keepalive_s`: the seconds of silence after which a stream sends a keepalive.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        table: SessionTable,
        admin: Admin,
        admin_key: str,
        models: ModelList,
        rules: RequestRules,
        on_refusal: OnRefusal,
        takes_namespaces: bool = True,
        max_body: int = MAX_BODY,
        runner_key: str = "",
        outside: OutsideApi | None = None,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        self._app, self._table, self._admin, self._max_body = app, table, admin, max_body
        self._keepalive_s = keepalive_s
        self._models, self._rules, self._on_refusal = models, rules, on_refusal
        self._takes_namespaces = takes_namespaces
        self._admin_hash, self._outside = _hash_of(admin_key), outside
        self._runner_hashes = [self._admin_hash, *([_hash_of(runner_key)] if runner_key else [])]
        self._refused_outside = 0
        self.counts = Counter(dict.fromkeys(COUNTED, 0))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        address = parse_address(scope["path"])
        try:
            await self._serve(scope, receive, send, address)
        except ApiError as error:
            headers = Headers(scope=scope)
            await self._record_refusal(address, headers, error)
            await send_error(send, error, _api(address, headers))
        except ClientGoneError:
            return

    async def _serve(self, scope: Scope, receive: Receive, send: Send, address: Address) -> None:
        headers = Headers(scope=scope)
        if address.path == "/health":
            await send_json(send, 200, {"status": "ok", "running": self._table.running})
        elif address.path.startswith("/admin/"):
            _check_key(headers, "admin", [self._admin_hash])
            body = await self._read_json(scope, receive) if scope["method"] == "POST" else {}
            await _send_result(send, self._admin.handle(scope["method"], address.path, body))
        elif address.path.startswith("/runner/") and self._outside is not None:
            _check_key(headers, "runner", self._runner_hashes)
            body = await self._read_json(scope, receive) if scope["method"] == "POST" else {}
            handling = _until_gone(self._outside.handle(scope["method"], address.path, body), receive)
            await _send_result(send, handling)
        else:
            await self._serve_session(scope, receive, send, address, headers)

    async def _record_refusal(self, address: Address, headers: Headers, error: ApiError) -> None:
        """Records what a program outside of the run did wrong, but not that it has no key, or came too often."""
        is_outside = address.path == REWARD_PATH or address.path.startswith(("/admin/", "/runner/"))
        if self._outside is None or not is_outside or error.status in (401, 429):
            return
        key = address.key or key_from_headers(headers)
        session = None if key is None else self._table.find_by_key(key)
        if session is not None:
            session.refused_outside += 1
            recorded = session.refused_outside <= MAX_REFUSED
        else:
            self._refused_outside += 1
            recorded = self._refused_outside <= MAX_REFUSED_OUTSIDE
            if self._refused_outside == MAX_REFUSED_OUTSIDE:
                logger.warning("%s refusals are in the journal; later ones are not recorded", MAX_REFUSED_OUTSIDE)
        if recorded:
            await self._outside.refused(address.path if session is None else session.session_id, error)

    async def _serve_session(
        self, scope: Scope, receive: Receive, send: Send, address: Address, headers: Headers
    ) -> None:
        session = self._find_session(address, headers)
        try:
            await self._serve_address(scope, receive, send, address, session, headers)
        except ApiError as error:
            self._note_refusal(session, address.path, error.status, error.message)
            raise

    def _note_refusal(self, session: Session, path: str, status: int, message: str) -> None:
        self.counts["gateway/requests_refused"] += 1
        session.refused += 1
        self._on_refusal(session, path, status, message)

    async def _serve_address(
        self, scope: Scope, receive: Receive, send: Send, address: Address, session: Session, headers: Headers
    ) -> None:
        address.check(scope["method"])
        if address.is_models:
            await self._serve_models(send, address, _api(address, headers))
        elif (response_id := address.response_id) is not None:
            self._table.require_open(session)
            await send_json(send, 200, stored_response(session, scope["method"], response_id))
        else:
            raw = await read_body(scope, receive, self._max_body)
            if address.path == REWARD_PATH:
                await _send_result(send, self._admin.reward(session, parse_body(raw)))
                return
            body = parse_request(raw)
            inner_scope = {**scope, "path": address.path, "raw_path": address.path.encode()}
            await self._serve_request(inner_scope, receive, send, address, session, body, raw, headers)

    async def _serve_models(self, send: Send, address: Address, api: Api) -> None:
        name = address.path.removeprefix(MODELS_PATH).removeprefix("/")
        await send_json(send, 200, self._models.describe(name, api) if name else self._models.list(api))

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
        calls = count_calls(body, self._rules) if generates else 0
        # In the body too, not only in the parsed parameters: those of greedy sampling have lost the others.
        sampling = session.sampling.resolve(body) if generates else {}
        namespaces = self._takes_namespaces and address.path == RESPONSES_PATH
        changes = changes_for(body, self._rules, self._models.context_length, sampling, namespaces=namespaces)
        is_response = address.path == RESPONSES_PATH
        previous = find_previous(session, body) if is_response else None
        referenced = find_referenced(session, body) if is_response else {}
        retried = _find_attempt(session, digest, headers) if generates else None
        try:
            with self._table.admit(session, calls, new_turn=generates and not retried):
                attempt = retried or _begin_attempt(session, digest, headers)
                is_retry = retried is not None
                context = RequestContext(session, session.requests, address.path, body, digest, attempt, is_retry)
                context.dropped_tools = tuple(changes.dropped_tools.values())
                context.replaced_media = changes.replaced_media
                context.previous, context.referenced = previous, referenced
                self.counts["gateway/hosted_tools_dropped"] += len(context.dropped_tools)
                self.counts["gateway/media_replaced"] += len(context.replaced_media)
                inner_scope = {**_with_json_type(scope), READ_BODY: ReadBody(body, changes.apply, raw)}
                await self._forward(inner_scope, DisconnectWatch(receive), send, address.api, context)
                self.counts["gateway/schemas_dropped"] += context.dropped_schema
        except ApiError as error:
            if generates and retried is None and is_retried(error.status) and "idempotency-key" not in headers:
                session.attempts.note_failed(digest)
            raise
        finally:
            if retried is not None:  # if this retry was refused, or lost its connection, another one follows
                retried.claimed = False

    async def _forward(
        self, scope: Scope, receive: DisconnectWatch, send: Send, api: Api, context: RequestContext
    ) -> None:
        keepalives = StreamKeepalive(send, context.path, self._keepalive_s)
        response = ResponseWatch(keepalives, api, context, partial(self._note_refusal, context.session, context.path))
        token = CURRENT.set(context)
        try:
            await self._app(scope, receive, response)
        finally:
            keepalives.stop()
            CURRENT.reset(token)
            attempts = context.session.attempts
            if response.complete and not receive.disconnected:
                attempts.mark_sent(context.attempt)
            elif not context.attempt.repeatable and attempts.remove(context.attempt):
                failed = not response.started and is_retried(response.error_status)
                if failed and context.attempt.key is None:
                    attempts.note_failed(context.attempt.digest)

    def _find_session(self, address: Address, headers: Headers) -> Session:
        """The session of the address, or else of the header; raises ApiError when they name two sessions."""
        header_key = key_from_headers(headers)
        if address.key is None:
            return self._table.by_key(header_key)
        session = self._table.by_key(address.key)
        if header_key is not None and self._table.find_by_key(header_key) not in (None, session):
            raise ApiError(ErrorCode.FOREIGN_KEY, "The key in the header is of another session than the address")
        return session

    async def _read_json(self, scope: Scope, receive: Receive) -> Body:
        return parse_body(await read_body(scope, receive, self._max_body))


def _hash_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _check_key(headers: Headers, kind: str, hashes: Sequence[bytes]) -> None:
    """Raises ApiError unless the headers have a key with one of these hashes."""
    key = key_from_headers(headers)
    if key is None:
        raise ApiError(ErrorCode.MISSING_KEY, f"No {kind} key. Send it as a bearer token or as x-api-key")
    if not any([hmac.compare_digest(_hash_of(key), known) for known in hashes]):
        raise ApiError(ErrorCode.UNKNOWN_KEY, f"This is not the {kind} key")


async def _until_gone(work: Coroutine[Any, Any, dict[str, Any]], receive: Receive) -> dict[str, Any]:
    """The result of the work, which is cancelled when the client disconnects; ClientGoneError is then raised."""
    working, gone = asyncio.create_task(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait({working, gone})


async def _send_result(send: Send, work: Awaitable[dict[str, Any]]) -> None:
    """Sends the result of an admin request; an unexpected error, as of the journal, is logged and sent as a 500."""
    try:
        body = await work
    except (ApiError, ClientGoneError):
        raise
    except Exception as error:  # the server answers for whatever is behind it, and goes on
        logger.error("admin request failed: %s", error, exc_info=not isinstance(error, SeamlessError))
        message = f"it could not be done: {type(error).__name__}"
        details = {"message": message, "type": "server_error", "param": None, "code": "server_error"}
        await send_json(send, 500, {"error": details})
    else:
        await send_json(send, 200, body)


def _api(address: Address, headers: Headers) -> Api:
    """The API that was called; the list of models has one address in both."""
    anthropic = address.is_models and ("anthropic-version" in headers or "x-api-key" in headers)
    return Api.ANTHROPIC if anthropic else address.api


def _find_attempt(session: Session, digest: str, headers: Headers) -> Attempt | None:
    count = headers.get("x-stainless-retry-count", "0")
    retry = count.isdecimal() and count.strip("0") != ""
    return session.attempts.find(digest, key=headers.get("idempotency-key"), retry=retry)


def _begin_attempt(session: Session, digest: str, headers: Headers) -> Attempt:
    return session.attempts.begin(digest, headers.get("idempotency-key"), session.requests)


def _with_json_type(scope: Scope) -> Scope:
    """The scope with JSON as content type, which the body was found to be, and without a length."""
    replaced = (b"content-type", b"content-length")
    headers = [(name, value) for name, value in scope["headers"] if name not in replaced]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}
