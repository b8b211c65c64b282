"""Errors that the gateway itself returns, in the form of the API that was called; vLLM's own errors are vLLM's.

A prompt that is too long is refused in the words and codes of the real services, by which clients compact or stop.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from seamless_verl.errors import SeamlessError


class Api(StrEnum):
    """Which API a path belongs to; it decides the form of errors."""

    OPENAI = "openai"  # `{"error": {...}}`
    ANTHROPIC = "anthropic"  # `{"type": "error", "error": {...}}`


class ErrorCode(StrEnum):
    """Why a request was refused before it reached a model, each with its HTTP status."""

    status: int

    def __new__(cls, code: str, status: int) -> ErrorCode:
        member = str.__new__(cls, code)
        member._value_, member.status = code, status
        return member

    MISSING_KEY = "missing_key", 401  # the request has no session key
    UNKNOWN_KEY = "invalid_api_key", 401  # no session has this key
    FOREIGN_KEY = "foreign_key", 403  # the key belongs to another session than the address
    QUOTA = "quota_exceeded", 403  # the session has used up its turns or tokens; a retry does not help
    NOT_FOUND = "not_found", 404  # nothing is served at this address
    WRONG_METHOD = "wrong_method", 405  # the address is right, the method is not
    CLOSED = "session_closed", 410  # the session has ended
    EXPIRED = "session_expired", 410  # the session's lifetime is over
    TOO_LARGE = "request_too_large", 413  # the body has more bytes than are accepted
    MALFORMED = "malformed_request", 400  # the body is not a JSON object in UTF-8, or a value in it is not valid
    UNSUPPORTED = "unsupported_parameter", 400
    """a parameter whose tokens could not be recorded, or that cannot reach the replicas"""
    OUT_OF_BOUNDS = "value_out_of_bounds", 400  # a value is larger, or nested deeper, than is accepted
    NO_PREVIOUS = "previous_response_not_found", 400
    """the response that this one would continue is not stored in the session"""
    NO_ITEM = "item_not_found", 400  # an item that the input names is in no stored conversation of the session
    NO_MODEL = "model_not_found", 404  # no model of this name is served
    REUSED_KEY = "idempotency_key_reused", 422  # the idempotency key was sent before with another request
    PROTOCOL = "protocol_version", 400  # the runner speaks another version of the protocol than the run
    LEASE_UNKNOWN = "lease_unknown", 404  # there is no such lease
    LEASE_EXPIRED = "lease_expired", 410
    """the lease was lost for want of a sign of life: another runner has the task, or will have it"""
    LEASE_ENDED = "lease_ended", 409
    """the lease has ended: its result was accepted, it was given back, or the task is no longer wanted"""
    REWARDED = "reward_exists", 409  # the session has another reward of this name already
    BUSY = "rate_limit_exceeded", 429  # too many calls run now; a later retry helps


_OPENAI_TYPE = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPE = _OPENAI_TYPE | {413: "request_too_large"}


OVERFLOW_STATUS, OVERFLOW_CODE = 400, "context_length_exceeded"
OVERFLOWN = {"/v1/responses": "input", "/v1/completions": "prompt", "/inference/v1/generate": "token_ids"}
RESPONSES_MESSAGE = "Your input exceeds the context window of this model. Please adjust your input and try again."


class ApiError(SeamlessError):
    """A request that the gateway refuses; `retry_after` in seconds where waiting helps."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(code, message, param, retry_after)
        self.code, self.message, self.param, self.retry_after = code, message, param, retry_after

    def __str__(self) -> str:
        return self.message

    @property
    def status(self) -> int:
        return self.code.status

    def body(self, api: Api) -> dict[str, Any]:
        if api is Api.ANTHROPIC:
            return anthropic_error(self.status, self.message)
        kind = _OPENAI_TYPE.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": str(self.code)}}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    fallback = "invalid_request_error" if status < 500 else "api_error"
    return {"type": "error", "error": {"type": _ANTHROPIC_TYPE.get(status, fallback), "message": message}}


@dataclass(frozen=True)
class Overflow:
    """A prompt of `tokens` that leaves no room for a reply in a context of `limit` tokens; `asked` of them at most."""

    tokens: int
    limit: int
    asked: int

    @property
    def message(self) -> str:
        """As OpenAI says it for chat completions."""
        return (
            f"This model's maximum context length is {self.limit} tokens. However, you requested "
            f"{self.tokens + self.asked} tokens ({self.tokens} in the messages, {self.asked} in the completion). "
            "Please reduce the length of the messages or completion."
        )

    @property
    def anthropic_message(self) -> str:
        """As Anthropic says it: of the prompt alone, or of a prompt that just fits, with the reply."""
        if self.tokens > self.limit:
            return f"prompt is too long: {self.tokens} tokens > {self.limit} maximum"
        return (
            f"input length and `max_tokens` exceed context limit: {self.tokens} + {self.asked} > {self.limit}, "
            "decrease input length or `max_tokens` and try again"
        )

    def openai_body(self, path: str) -> dict[str, Any]:
        message = RESPONSES_MESSAGE if path == "/v1/responses" else self.message
        param = OVERFLOWN.get(path, "messages")
        return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": OVERFLOW_CODE}}


def failed_response_events(response_id: str, model: str, created: int) -> bytes:
    """The events of a streamed response that fails for its length: such a stream begins, and fails."""
    nothing = dict.fromkeys(("error", "incomplete_details", "instructions", "temperature", "top_p", "usage"))
    response = {
        **{"id": response_id, "object": "response", "created_at": created, "model": model, "status": "in_progress"},
        **{"output": [], "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
        **nothing,
    }
    failed = {**response, "status": "failed", "error": {"code": OVERFLOW_CODE, "message": RESPONSES_MESSAGE}}
    events = (
        {"type": "response.created", "sequence_number": 0, "response": response},
        {"type": "response.in_progress", "sequence_number": 1, "response": response},
        {"type": "response.failed", "sequence_number": 2, "response": failed},
    )
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)
