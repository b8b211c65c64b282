"""Session middleware: it admits each request to the session of its key before vLLM's serving classes see it.

Invariants:
- A request that passes runs in one open session, within its quotas, and is numbered in it.
- An error has the form of the API that was called; a client never sees a traceback.
- A request's place in its session is returned when the request ends, in whatever way.
- What is recorded of refusals is bounded, for each session and for all programs outside of the run together.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from seamless_verl.errors import SeamlessError
from seamless_verl.gateway.admin import Admin
from seamless_verl.gateway.api_errors import Api, ApiError, ErrorCode
from seamless_verl.gateway.fast_path import READ_BODY
from seamless_verl.gateway.http import (
    GENERATION_PATHS,
    MODELS_PATH,
    RESPONSES_PATH,
    REWARD_PATH,
    Address,
    Body,
    ClientGoneError,
    digest_request,
    key_from_headers,
    parse_address,
    parse_body,
    parse_request,
    read_body,
    reply_name,
    with_reply_name,
)
from seamless_verl.gateway.http_responses import (
    KEEPALIVE_S,
    DisconnectWatch,
    ModelList,
    ResponseWatch,
    StreamKeepalive,
    send_error,
    send_json,
)
from seamless_verl.gateway.images import IMAGE
from seamless_verl.gateway.request_context import CURRENT, RequestContext
from seamless_verl.gateway.request_rules import MAX_BODY, Adapted, RequestRules, adapt, count_calls, media_in
from seamless_verl.gateway.retries import Attempt, is_retried
from seamless_verl.gateway.session import Session, hash_key
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.gateway.token_requests import TOKENS_PATH, adapt_tokens, parameters_of
from seamless_verl.trajectory.session import Closed

logger = logging.getLogger(__name__)

COUNTED = (
    *("gateway/requests_refused", "gateway/hosted_tools_dropped", "gateway/media_replaced", "gateway/schemas_dropped"),
)
MAX_REFUSED = 256  # refusals of one session that are recorded as of a program outside of the run,
MAX_REFUSED_OUTSIDE = 16_384  # and of all requests without an open session: programs may repeat a mistake for ever
OnRefusal: TypeAlias = Callable[[Session, str, int, str], None]
"""Gets the session, the path, the status and the message of a request that got an error."""
ServeRunner: TypeAlias = Callable[[str, str, Body], Coroutine[Any, Any, dict[str, Any]]]
"""The reply to a request below `/runner/`, by its method, path and body; raises ApiError."""
OnOutsideRefusal: TypeAlias = Callable[[str, ApiError], Awaitable[None]]
"""Gets a session's id, or a path, and why a request of the admin API, of a runner, or with a reward was refused."""


@dataclass(frozen=True)
class GatewaySettings:
    """How the gateway serves one model."""

    model: str
    admin_key: str
    options: Sequence[str] = ()  # of `vllm serve`
    host: str = "127.0.0.1"  # where it listens
    port: int = 0  # 0 takes any free one
    max_running: int | None = None  # calls, see SessionTable
    max_body: int = MAX_BODY  # bytes
    grace: float = 5.0  # seconds, for calls at the stop
    rules: RequestRules = field(default_factory=RequestRules)
    public_address: str | None = None  # that agents are given: a host, or a URL where something changes the port
    runner_key: str = ""
    keepalive_s: float = KEEPALIVE_S  # seconds of silence after which a stream sends a keepalive

    def url(self, port: int) -> str:
        """The address for agents, without a slash at its end."""
        address = self.public_address or self.host
        return address.rstrip("/") if "://" in address else f"http://{address}:{port}"


@dataclass(frozen=True)
class _Request:
    """A request on its way through the middleware."""

    scope: Scope
    receive: Receive
    send: Send
    address: Address
    headers: Headers

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def api(self) -> Api:
        """The API that was called; the list of models has one address in both."""
        by_headers = "anthropic-version" in self.headers or "x-api-key" in self.headers
        return Api.ANTHROPIC if self.address.is_models and by_headers else self.address.api


class SessionMiddleware:
    """ASGI middleware: it admits requests to `app`, and serves the admin API and rewards itself.

    `takes_namespaces`: the app's Responses API serves the functions of a `namespace` tool. `takes_images`: the model
    does.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: GatewaySettings,
        *,
        table: SessionTable,
        admin: Admin,
        models: ModelList,
        on_refusal: OnRefusal,
        takes_namespaces: bool = True,
        takes_images: bool = False,
        serve_runner: ServeRunner | None = None,
        on_outside_refusal: OnOutsideRefusal | None = None,
    ) -> None:
        self._app, self._settings, self._table, self._admin = app, settings, table, admin
        self._models, self._on_refusal = models, on_refusal
        self._takes_namespaces, self._takes_images = takes_namespaces, takes_images
        self._serve_runner, self._on_outside_refusal = serve_runner, on_outside_refusal
        self._admin_hash = hash_key(settings.admin_key)
        self._runner_hashes = [self._admin_hash, *map(hash_key, filter(None, [settings.runner_key]))]
        self._refused_outside = 0
        self.counts = Counter(dict.fromkeys(COUNTED, 0))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _Request(scope, receive, send, parse_address(scope["path"]), Headers(scope=scope))
        try:
            await self._serve(request)
        except ApiError as error:
            await self._record_refusal(request, error)
            await send_error(send, error, request.api)
        except ClientGoneError:
            return

    async def _serve(self, request: _Request) -> None:
        path = request.address.path
        if path == "/health":
            await send_json(request.send, 200, {"status": "ok", "running": self._table.running})
        elif path.startswith("/admin/"):
            _check_key(request.headers, "admin", [self._admin_hash])
            body = await self._read_json(request)
            await _send_result(request.send, self._admin.handle(request.method, path, body))
        elif path.startswith("/runner/") and self._serve_runner is not None:
            _check_key(request.headers, "runner", self._runner_hashes)
            body = await self._read_json(request)
            work = _until_gone(self._serve_runner(request.method, path, body), request.receive)
            await _send_result(request.send, work)
        else:
            session = self._find_session(request.address, request.headers)
            try:
                await self._serve_address(request, session)
            except ApiError as error:
                self._note_refusal(session, path, error.code is ErrorCode.QUOTA, error.status, error.message)
                raise

    async def _record_refusal(self, request: _Request, error: ApiError) -> None:
        """Records what a program outside of the run did wrong, but not that it has no key, or came too often."""
        path = request.address.path
        is_outside = path == REWARD_PATH or path.startswith(("/admin/", "/runner/"))
        if self._on_outside_refusal is None or not is_outside or error.status in (401, 429):
            return
        key = request.address.key or key_from_headers(request.headers)
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
            await self._on_outside_refusal(path if session is None else session.session_id, error)

    def _note_refusal(self, session: Session, path: str, is_limit: bool, status: int, message: str) -> None:
        self.counts["gateway/requests_refused"] += 1
        session.refused += 1
        session.failed_as = Closed.LIMIT if is_limit else Closed.ENGINE_FAILED if status >= 500 else ""
        self._on_refusal(session, path, status, message)

    async def _serve_address(self, request: _Request, session: Session) -> None:
        address, send = request.address, request.send
        address.check(request.method)
        if address.is_models:
            name = address.path.removeprefix(MODELS_PATH).removeprefix("/")
            models, api = self._models, request.api
            await send_json(send, 200, models.describe(name, api) if name else models.list(api))
        elif (response_id := address.response_id) is not None:
            self._table.require_open(session)
            await send_json(send, 200, session.responses.handle(request.method, response_id))
        else:
            raw = await read_body(request.scope, request.receive, self._settings.max_body)
            if address.path == REWARD_PATH:
                await _send_result(send, self._admin.reward(session, parse_body(raw)))
            else:
                await self._serve_model(request, session, parse_request(raw))

    async def _serve_model(self, request: _Request, session: Session, body: Body) -> None:
        path, key = request.address.path, request.headers.get("idempotency-key")
        digest = digest_request(path, body)
        generates, is_response = path in GENERATION_PATHS, path == RESPONSES_PATH
        rules = self._settings.rules
        asked = parameters_of(path, body)
        calls = count_calls(asked, rules) if generates else 0
        # In the body too, not only in the parsed parameters: those of greedy sampling have lost the others.
        sampling = session.sampling.resolve(asked) if generates else {}
        namespaces = self._takes_namespaces and is_response
        adapting = partial(adapt, body, rules, self._models.context_length, sampling, namespaces=namespaces)
        if path == TOKENS_PATH:
            adapted = Adapted(adapt_tokens(body, rules.max_nesting, self._models.context_length, sampling))
        elif self._takes_images and IMAGE in media_in(body):  # read in a thread: that takes long
            adapted = await asyncio.to_thread(adapting, images=True)
        else:
            adapted = adapting(images=self._takes_images)
        previous = session.responses.previous(body) if is_response else None
        referenced = session.responses.referenced(body) if is_response else {}
        retried = session.attempts.find(digest, key=key, retry=_is_marked(request.headers)) if generates else None
        try:
            with self._table.admit(session, calls, new_turn=generates and not retried):
                attempt = retried or Attempt(digest, key, session.requests, reply_name(path, body, request.headers))
                if generates and retried is None:
                    session.attempts.add(attempt)
                context = RequestContext(
                    *(session, session.requests, path, body, digest, attempt),
                    is_retry=retried is not None,
                    dropped_tools=adapted.dropped_tools,
                    replaced_media=adapted.replaced_media,
                    images={**session.images, **adapted.images},
                    previous=previous,
                    referenced=referenced,
                    traceparent=request.headers.get("traceparent", ""),
                )
                self.counts["gateway/hosted_tools_dropped"] += len(context.dropped_tools)
                self.counts["gateway/media_replaced"] += len(context.replaced_media)
                await self._forward(request, adapted.body, context)
                self.counts["gateway/schemas_dropped"] += context.dropped_schema
        except ApiError as error:
            if generates and retried is None and is_retried(error.status) and key is None:
                session.attempts.note_failed(digest)
            raise
        finally:
            if retried is not None:  # if this retry was refused, or lost its connection, another one follows
                retried.claimed = False

    async def _forward(self, request: _Request, body: Body, context: RequestContext) -> None:
        receive = DisconnectWatch(request.receive)
        keepalives = StreamKeepalive(request.send, context.path, self._settings.keepalive_s)

        def on_error(status: int, message: str) -> None:
            self._note_refusal(context.session, context.path, context.overflow is not None, status, message)

        response = ResponseWatch(keepalives, request.address.api, context, on_error)
        scope, attempt, attempts = request.scope, context.attempt, context.session.attempts
        if context.path in GENERATION_PATHS:
            scope = with_reply_name(scope, context.path, attempt.reply_name)
        token = CURRENT.set(context)
        attempt.requests += 1
        try:
            await self._app({**scope, "path": context.path, READ_BODY: body}, receive, response)
        finally:
            attempt.requests -= 1
            keepalives.stop()
            CURRENT.reset(token)
            if response.complete:
                context.session.failed_as = ""
            if response.complete and not receive.disconnected:
                attempts.mark_sent(attempt)
            elif not attempt.repeatable and attempts.remove(attempt):
                failed = not response.started and is_retried(response.error_status)
                if failed and attempt.key is None:
                    attempts.note_failed(attempt.digest)

    def _find_session(self, address: Address, headers: Headers) -> Session:
        """The session of the address, or else of the header; raises ApiError when they name two sessions."""
        header_key = key_from_headers(headers)
        if address.key is None:
            return self._table.by_key(header_key)
        session = self._table.by_key(address.key)
        if header_key is not None and self._table.find_by_key(header_key) not in (None, session):
            raise ApiError(ErrorCode.FOREIGN_KEY, "The key in the header is of another session than the address")
        return session

    async def _read_json(self, request: _Request) -> Body:
        """The body of a POST; of another method it is empty."""
        if request.method != "POST":
            return {}
        return parse_body(await read_body(request.scope, request.receive, self._settings.max_body))


def _check_key(headers: Headers, kind: str, hashes: Sequence[bytes]) -> None:
    """Raises ApiError unless the headers have a key with one of these hashes."""
    key = key_from_headers(headers)
    if key is None:
        raise ApiError(ErrorCode.MISSING_KEY, f"No {kind} key. Send it as a bearer token or as x-api-key")
    if not any([hmac.compare_digest(hash_key(key), known) for known in hashes]):
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


def _is_marked(headers: Headers) -> bool:
    """Whether an SDK says that this is a retry."""
    count = headers.get("x-stainless-retry-count", "0")
    return bool(count.isdecimal() and count.strip("0") != "")
