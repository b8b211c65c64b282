"""HTTP requests of the gateway: where it listens, and the addresses, keys and bodies of requests."""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from seamless_verl.errors import shorten
from seamless_verl.gateway.api_errors import Api, ApiError, ErrorCode
from seamless_verl.gateway.request_context import digest_of
from seamless_verl.gateway.request_rules import is_deeper, without_empty
from seamless_verl.gateway.token_requests import TOKENS_PATH, parameters_of

UNSUPPORTED_PARAMETERS = {
    "use_beam_search": "beam search tries tokens that no reply contains",
    "prompt_logprobs": "replicas do not score prompts",
    "prompt_embeds": "a prompt without tokens cannot be recorded",
    "kv_transfer_params": "the replicas' caches are their own",
    "ec_transfer_params": "the replicas' caches are their own",
    "logprob_token_ids": "replicas name the likeliest tokens only",
    "repetition_detection": "replicas do not look for repetitions",
    "trace_decode_token_ids": "what is trained is what the model sampled",
    "conversation": "a history is kept by its last response, which previous_response_id names",
    "background": "a reply nobody waits for has no place in a session",
}
"""Parameters that no agent may send, and why. The gateway adds some of them itself."""

RESPONSES_PATH, MESSAGES_PATH = "/v1/responses", "/v1/messages"
GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", RESPONSES_PATH, MESSAGES_PATH, TOKENS_PATH})
ONE_CHOICE_PATHS = frozenset({RESPONSES_PATH, MESSAGES_PATH})  # the real services refuse `n` there
COUNT_TOKENS_PATH = f"{MESSAGES_PATH}/count_tokens"
REWARD_PATH = "/v1/session/reward"
MODELS_PATH = "/v1/models"
POSTED = (*GENERATION_PATHS, COUNT_TOKENS_PATH, REWARD_PATH)
METHODS: dict[str, tuple[str, ...]] = dict.fromkeys(POSTED, ("POST",)) | {MODELS_PATH: ("GET",)}
REQUEST_ID = "x-request-id"
STORED_METHODS = ("GET", "DELETE")
WITHOUT_VERSION = frozenset(path.split("/")[2] for path in METHODS if path.startswith("/v1/"))
"""How paths begin that are served without `/v1`, too."""

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escaped half of a surrogate pair: only a text with one may be no Unicode."""

BACKLOG = 2048
LOOPBACK = "127.0.0.1"
COVERING = frozenset({LOOPBACK, "localhost", "0.0.0.0", ""})  # hosts that are the loopback address, or have it
TRIES = 16  # for a port that is free at both addresses

MAX_DIGITS = 18  # of a length; Python refuses to read a number of thousands of digits
MAX_DEPTH = 200  # of objects and lists in a body: what can be read must also be written, and read again
Body: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Address:
    """The target of a request: the path in the API's own form, and the key that the address contains, if any."""

    path: str
    key: str | None

    @property
    def api(self) -> Api:
        return Api.ANTHROPIC if self.path.startswith("/v1/messages") else Api.OPENAI

    @property
    def response_id(self) -> str | None:
        """The id of the stored response that it names, if any."""
        prefix = f"{RESPONSES_PATH}/"
        found = self.path.removeprefix(prefix) if self.path.startswith(prefix) else ""
        return found if found and "/" not in found else None

    @property
    def is_models(self) -> bool:
        """Whether it is the list of models, or one of them."""
        return f"{self.path}/".startswith(f"{MODELS_PATH}/")

    def check(self, method: str) -> None:
        """Raises ApiError when nothing is served at the path, or not with this method."""
        if self.response_id is not None:
            served = STORED_METHODS
        elif self.is_models:
            served = ("GET",)
        else:
            served = METHODS.get(self.path, ())
        if not served:
            raise ApiError(ErrorCode.NOT_FOUND, f"Nothing is served at {self.path}. Served are {', '.join(METHODS)}")
        if method not in served:
            raise ApiError(ErrorCode.WRONG_METHOD, f"{self.path} takes {' or '.join(served)}, not {method}")


def open_listeners(host: str, port: int = 0) -> list[socket.socket]:
    """Sockets that listen at `host`, for other machines, and at the loopback address; `port` 0 takes any free one.

    Raises OSError: the port is taken, or `host` is no address of this machine.
    """
    tries = TRIES
    while True:
        first = socket.create_server((host, port), backlog=BACKLOG)
        if host in COVERING:
            return [first]
        try:
            return [first, socket.create_server((LOOPBACK, first.getsockname()[1]), backlog=BACKLOG)]
        except OSError:  # another program has this port at the other address
            first.close()
            tries -= 1
            if port or not tries:
                raise


def parse_address(path: str) -> Address:
    """Accepts both forms, `/v1/...` and `/s/<session key>/v1/...`, and both without the `/v1`.

    Of the clients that read a base URL from ANTHROPIC_BASE_URL some add the `/v1`, and others expect it there.
    """
    key, rest = None, path.removeprefix("/")
    if path.startswith("/s/"):
        key, _, rest = path.removeprefix("/s/").partition("/")
    rest = rest.rstrip("/")
    return Address(f"/v1/{rest}" if rest.partition("/")[0] in WITHOUT_VERSION else f"/{rest}", key)


def key_from_headers(headers: Headers) -> str | None:
    """The key of the `authorization` header (OpenAI's SDK), or else of `x-api-key` (Anthropic's)."""
    scheme, _, token = str(headers.get("authorization", "")).partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    key: str | None = headers.get("x-api-key")
    return key


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body; ApiError beyond `limit` bytes, ClientGoneError if the client left before its end."""
    declared = Headers(scope=scope).get("content-length", "0")
    if declared.isdecimal() and (len(declared) > MAX_DIGITS or int(declared) > limit):
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
    """The client disconnected before its request was complete."""


def parse_body(data: bytes) -> Body:
    """The body as a JSON object; raises ApiError for anything else."""
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite_float)
    except UnicodeDecodeError as error:
        raise _malformed(f"it is no UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise _malformed("it is nested too deeply") from error
    except ValueError as error:
        raise _malformed(f"it is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise _malformed("it is no JSON object")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and is_deeper(body, MAX_DEPTH):
        raise _malformed(f"it is nested more than {MAX_DEPTH} deep")
    if SURROGATE.search(data) is not None:
        _check_characters(body)
    return body


def parse_request(data: bytes) -> Body:
    """The body of a request to a model, without its empty fields; raises ApiError as `parse_body` does."""
    return without_empty(parse_body(data))


def _check_characters(body: Body) -> None:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _malformed("a text in it has half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise _malformed("it is nested too deeply") from error


def digest_request(path: str, body: Mapping[str, Any]) -> str:
    """The request's digest; raises ApiError for a parameter that is not served."""
    asked = parameters_of(path, body)
    for name, why in UNSUPPORTED_PARAMETERS.items():
        if body.get(name) not in (None, False) or asked.get(name) not in (None, False):
            raise ApiError(ErrorCode.UNSUPPORTED, f"{name} is not served here: {why}. Leave it out", param=name)
    if path in ONE_CHOICE_PATHS and body.get("n") not in (None, 1):
        message = f"Unknown parameter: 'n'. A reply of {path} is one choice; /v1/chat/completions gives several"
        raise ApiError(ErrorCode.UNSUPPORTED, message, param="n")
    try:
        return digest_of(path, body)
    except RecursionError as error:
        raise _malformed("it is nested too deeply") from error


def reply_name(path: str, body: Mapping[str, Any], headers: Headers) -> str:
    """What the ids of replies to a request have behind the beginning of their API: as in vLLM the client's own name."""
    given, header = body.get("request_id"), headers.get(REQUEST_ID)
    own = given if path != MESSAGES_PATH and isinstance(given, str) else None
    if path == RESPONSES_PATH:
        return own or f"resp_{uuid4().hex}"
    return header or own or uuid4().hex


def with_reply_name(scope: Scope, path: str, name: str) -> Scope:
    """The request, the ids of whose replies have this name: that of a retry has the one that its first attempt had.

    Not in its body: vLLM repeats the body in what it says of one that is not valid. Responses are named in `serving`.
    """
    if path == RESPONSES_PATH:
        return scope
    headers = [(key, value) for key, value in scope["headers"] if key != REQUEST_ID.encode()]
    return {**scope, "headers": [*headers, (REQUEST_ID.encode(), name.encode("latin-1", "backslashreplace"))]}


def _too_large(limit: int) -> ApiError:
    message = f"The body has more than the {limit} bytes that are accepted"
    return ApiError(ErrorCode.TOO_LARGE, message)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # it would be stored, and sent again, as a number that JSON does not have
        raise ValueError(f"the number {shorten(text)} is too large")
    return value


def _malformed(why: str) -> ApiError:
    return ApiError(ErrorCode.MALFORMED, f"The body cannot be read: {why}")
