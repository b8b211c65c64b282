"""Errors that the gateway itself returns, in the form of the API that was called; vLLM's own errors are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from seamless_verl.errors import SeamlessError


class Api(StrEnum):
    """Which API a path belongs to; it decides the form of errors."""

    OPENAI = "openai"
    """`{"error": {...}}`"""
    ANTHROPIC = "anthropic"
    """`{"type": "error", "error": {...}}`"""


class ErrorCode(StrEnum):
    """Why a request was refused before it reached a model."""

    MISSING_KEY = "missing_key"
    """the request has no session key"""
    UNKNOWN_KEY = "invalid_api_key"
    """no session has this key"""
    FOREIGN_KEY = "foreign_key"
    """the key belongs to another session than the address"""
    QUOTA = "quota_exceeded"
    """the session has used up its turns or tokens; a retry does not help"""
    NOT_FOUND = "not_found"
    """nothing is served at this address"""
    WRONG_METHOD = "wrong_method"
    """the address is right, the method is not"""
    CLOSED = "session_closed"
    """the session has ended"""
    EXPIRED = "session_expired"
    """the session's lifetime is over"""
    TOO_LARGE = "request_too_large"
    """the body has more bytes than are accepted"""
    MALFORMED = "malformed_request"
    """the body is not a JSON object in UTF-8, or a value in it is not valid"""
    UNSUPPORTED = "unsupported_parameter"
    """a parameter whose tokens could not be recorded, or that cannot reach the replicas"""
    OUT_OF_BOUNDS = "value_out_of_bounds"
    """a value is larger, or nested deeper, than is accepted"""
    NO_PREVIOUS = "previous_response_not_found"
    """the response that this one would continue is not stored in the session"""
    NO_ITEM = "item_not_found"
    """an item that the input names is in no stored conversation of the session"""
    NO_MODEL = "model_not_found"
    """no model of this name is served"""
    REUSED_KEY = "idempotency_key_reused"
    """the idempotency key was sent before with another request"""
    PROTOCOL = "protocol_version"
    """the runner speaks another version of the protocol than the run"""
    LEASE_UNKNOWN = "lease_unknown"
    """there is no such lease"""
    LEASE_EXPIRED = "lease_expired"
    """the lease was lost for want of a sign of life: another runner has the task, or will have it"""
    LEASE_ENDED = "lease_ended"
    """the lease has ended: its result was accepted, it was given back, or the task is no longer wanted"""
    REWARDED = "reward_exists"
    """the session has another reward of this name already"""
    BUSY = "rate_limit_exceeded"
    """too many calls run now; a later retry helps"""


STATUS = {
    ErrorCode.MISSING_KEY: 401,
    ErrorCode.UNKNOWN_KEY: 401,
    ErrorCode.FOREIGN_KEY: 403,
    ErrorCode.QUOTA: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.WRONG_METHOD: 405,
    ErrorCode.CLOSED: 410,
    ErrorCode.EXPIRED: 410,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.MALFORMED: 400,
    ErrorCode.UNSUPPORTED: 400,
    ErrorCode.OUT_OF_BOUNDS: 400,
    ErrorCode.NO_PREVIOUS: 400,
    ErrorCode.NO_ITEM: 400,
    ErrorCode.NO_MODEL: 404,
    ErrorCode.REUSED_KEY: 422,
    ErrorCode.PROTOCOL: 400,
    ErrorCode.LEASE_UNKNOWN: 404,
    ErrorCode.LEASE_EXPIRED: 410,
    ErrorCode.LEASE_ENDED: 409,
    ErrorCode.REWARDED: 409,
    ErrorCode.BUSY: 429,
}

_OPENAI_TYPE = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPE = _OPENAI_TYPE | {413: "request_too_large"}


class ApiError(SeamlessError):
    """A request that the gateway refuses; `retry_after` in seconds where waiting helps."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(code, message, param, retry_after)
        self.code, self.message, self.param, self.retry_after = code, message, param, retry_after

    def __str__(self) -> str:
        return self.message

    @property
    def status(self) -> int:
        return STATUS[self.code]


@dataclass(frozen=True)
class ErrorResponse:
    """An error as HTTP: status, headers and the JSON body."""

    status: int
    headers: dict[str, str]
    body: dict[str, Any]


def error_response(error: ApiError, api: Api) -> ErrorResponse:
    """The error in the form of the API that was called."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if api is Api.ANTHROPIC:
        return ErrorResponse(error.status, headers, anthropic_error(error.status, error.message))
    kind = _OPENAI_TYPE.get(error.status, "invalid_request_error")
    body = {"message": error.message, "type": kind, "param": error.param, "code": str(error.code)}
    return ErrorResponse(error.status, headers, {"error": body})


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """The JSON body of an error in Anthropic's form."""
    fallback = "invalid_request_error" if status < 500 else "api_error"
    return {"type": "error", "error": {"type": _ANTHROPIC_TYPE.get(status, fallback), "message": message}}
