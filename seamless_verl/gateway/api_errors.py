"""What the gateway itself refuses, and how each API says so. vLLM's own errors are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from seamless_verl.errors import SeamlessError


class Api(StrEnum):
    """Whose error shape and manners a path has."""

    OPENAI = "openai"
    """`{"error": {...}}`"""
    ANTHROPIC = "anthropic"
    """`{"type": "error", "error": {...}}`"""


class ErrorCode(StrEnum):
    """Why a request was refused before a model saw it."""

    MISSING_KEY = "missing_key"
    """no session key came with it"""
    UNKNOWN_KEY = "invalid_api_key"
    """no session has this key"""
    FOREIGN_KEY = "foreign_key"
    """the key is of another session than the address names"""
    QUOTA = "quota_exceeded"
    """the session has used up its turns or tokens; trying again does not help"""
    NOT_FOUND = "not_found"
    """nothing is served at this address"""
    WRONG_METHOD = "wrong_method"
    """the address is right, the method is not"""
    CLOSED = "session_closed"
    """the session has ended"""
    EXPIRED = "session_expired"
    """the session's time is over"""
    TOO_LARGE = "request_too_large"
    """the body has more bytes than are accepted"""
    MALFORMED = "malformed_request"
    """the body is no JSON object in UTF-8, or a value in it cannot be"""
    UNSUPPORTED = "unsupported_parameter"
    """a parameter that would leave tokens without a record, or cannot reach the replicas"""
    REUSED_KEY = "idempotency_key_reused"
    """the idempotency key came earlier with another request"""
    BUSY = "rate_limit_exceeded"
    """too many calls run at once; trying again later helps"""


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
    ErrorCode.REUSED_KEY: 422,
    ErrorCode.BUSY: 429,
}

_OPENAI_TYPE = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPE = _OPENAI_TYPE | {413: "request_too_large"}


class ApiError(SeamlessError):
    """A request the gateway does not take; `retry_after` in seconds where waiting helps."""

    def __init__(
        self, reason: ErrorCode, message: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(reason, message, param, retry_after)
        self.reason, self.message, self.param, self.retry_after = reason, message, param, retry_after

    def __str__(self) -> str:
        return self.message

    @property
    def status(self) -> int:
        return STATUS[self.reason]


@dataclass(frozen=True)
class ErrorResponse:
    """A refusal as HTTP: status, headers and the JSON body."""

    status: int
    headers: dict[str, str]
    body: dict[str, Any]


def error_response(refusal: ApiError, api: Api) -> ErrorResponse:
    """The refusal in the shape of the API that was called."""
    headers = {} if refusal.retry_after is None else {"retry-after": str(refusal.retry_after)}
    if api is Api.ANTHROPIC:
        return ErrorResponse(refusal.status, headers, anthropic_error(refusal.status, refusal.message))
    kind = _OPENAI_TYPE.get(refusal.status, "invalid_request_error")
    error = {"message": refusal.message, "type": kind, "param": refusal.param, "code": str(refusal.reason)}
    return ErrorResponse(refusal.status, headers, {"error": error})


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    fallback = "invalid_request_error" if status < 500 else "api_error"
    return {"type": "error", "error": {"type": _ANTHROPIC_TYPE.get(status, fallback), "message": message}}
