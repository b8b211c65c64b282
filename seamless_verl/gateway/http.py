"""What comes over the wire, read with care: bodies bounded and parsed, keys and addresses found.

Sending: refusals in the caller's shape, and what vLLM answers, watched and where need be reshaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from seamless_verl.gateway.api_errors import Api, ApiError, ErrorCode, anthropic_error, error_response
from seamless_verl.gateway.request_context import digest_of

REFUSED = {
    "use_beam_search": "beam search tries tokens that no reply contains",
    "prompt_logprobs": "replicas do not score prompts",
    "prompt_embeds": "a prompt without tokens cannot be recorded",
    "kv_transfer_params": "the replicas' caches are their own",
    "ec_transfer_params": "the replicas' caches are their own",
    "logprob_token_ids": "replicas name the likeliest tokens only",
    "repetition_detection": "replicas do not look for repetitions",
    "background": "a reply nobody waits for has no place in a session",
}
"""Parameters no agent may send, and why."""

POSTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
GENERATING = POSTED
COUNTING = "/v1/messages/count_tokens"
REWARD = "/v1/session/reward"
MODELS = "/v1/models"
METHODS = dict.fromkeys((*POSTED, COUNTING, REWARD), "POST") | {MODELS: "GET"}

Body: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Address:
    """Where a request goes: `path` as the API writes it, and the key the address itself carries, if any."""

    path: str
    key: str | None

    @property
    def api(self) -> Api:
        return Api.ANTHROPIC if self.path.startswith("/v1/messages") else Api.OPENAI

    @property
    def of_models(self) -> bool:
        """Whether the models are asked for, or one of them."""
        return f"{self.path}/".startswith(f"{MODELS}/")

    def check(self, method: str) -> None:
        """Raises Refusal where nothing is served there, or not with this method."""
        served = "GET" if self.of_models else METHODS.get(self.path)
        if served is None:
            raise ApiError(ErrorCode.NOT_FOUND, f"Nothing is served at {self.path}. Served are {', '.join(METHODS)}")
        if method != served:
            raise ApiError(ErrorCode.WRONG_METHOD, f"{self.path} takes {served}, not {method}")


def address_of(path: str) -> Address:
    """Both forms: `/v1/...`, and `/s/<session key>/v1/...`."""
    if path.startswith("/s/"):
        key, _, rest = path.removeprefix("/s/").partition("/")
        return Address(f"/{rest.rstrip('/')}", key)
    return Address(path.rstrip("/") or "/", None)


def header_key(headers: Headers) -> str | None:
    """The key as either kind of SDK sends it."""
    scheme, _, token = str(headers.get("authorization", "")).partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    key: str | None = headers.get("x-api-key")
    return key


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """All of the body; raises Refusal where it is longer than `limit` bytes."""
    declared = Headers(scope=scope).get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    parts, size, more = [], 0, True
    while more:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > limit:
            raise _too_large(limit)
    return b"".join(parts)


class ClientGoneError(Exception):
    """The client went away before it had said what it wants; there is nobody to answer."""


def parse_body(data: bytes) -> Body:
    """A JSON object; raises Refusal for anything else."""
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _malformed(f"it is no UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise _malformed("it is nested too deeply") from error
    except ValueError as error:
        raise _malformed(f"it is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise _malformed("it is no JSON object")
    return body


def checked_digest(path: str, body: Mapping[str, Any]) -> str:
    """The request's digest; raises Refusal for a parameter that is refused, or text that is no Unicode."""
    for name, why in REFUSED.items():
        if body.get(name) not in (None, False):
            raise ApiError(ErrorCode.UNSUPPORTED, f"{name} is not served here: {why}. Leave it out", param=name)
    try:
        return digest_of(path, body)
    except UnicodeEncodeError as error:
        raise _malformed("a text in it has half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise _malformed("it is nested too deeply") from error


def _too_large(limit: int) -> ApiError:
    return ApiError(ErrorCode.TOO_LARGE, f"The body has more than the {limit} bytes that are accepted")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _malformed(why: str) -> ApiError:
    return ApiError(ErrorCode.MALFORMED, f"The body cannot be read: {why}")


async def send_json(send: Send, status: int, body: object, headers: dict[str, str] | None = None) -> None:
    data = json.dumps(body).encode()
    fields = {"content-type": "application/json", "content-length": str(len(data))} | (headers or {})
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": data})


async def send_refusal(send: Send, refusal: ApiError, api: Api) -> None:
    reply = error_response(refusal, api)
    await send_json(send, reply.status, reply.body, reply.headers)


class ReplayedBody:
    """A receive that gives a body that was read already, and then what comes after it."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()


class DisconnectWatch:
    """A receive that knows whether the client is gone."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.gone = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.gone |= message["type"] == "http.disconnect"
        return message


class ResponseWatch:
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
