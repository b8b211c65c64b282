"""What a session may use, and how its tokens are sampled: parsed once from the JSON of an admin call.

One session as the gateway knows it; what was said in it is the recorder's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeVar

from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.gateway.prefix_index import PrefixIndex
from seamless_verl.gateway.retries import Attempts

SAMPLED = {
    "temperature": (0.0, None),
    "top_p": (0.0, 1.0),
    "top_k": (-1, None),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, None),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (None, None),
}
"""The parameters a session can set, with their bounds."""


@dataclass(frozen=True)
class SessionLimits:
    """Bounds of one session; None is no bound. `lifetime` in seconds from its opening.

    `max_tokens` counts generated tokens. Calls that run side by side are each given what is left when they start,
    so together they may pass it by what one of them was given.
    """

    max_turns: int | None = None
    max_tokens: int | None = None
    max_concurrent: int | None = None
    lifetime: float | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            number = (int, float) if one.name == "lifetime" else int
            if value is not None and (not isinstance(value, number) or isinstance(value, bool) or value <= 0):
                raise _wrong(f"limits.{one.name}", value, "give a number above 0, or leave it out")


@dataclass(frozen=True)
class SessionSampling:
    """`defaults` hold where an agent says nothing, `overrides` whatever it says; `max_tokens` caps each call."""

    defaults: Mapping[str, float] = field(default_factory=dict)
    overrides: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for part in ("defaults", "overrides"):
            chosen = getattr(self, part)
            if not isinstance(chosen, Mapping):
                raise _wrong(f"sampling.{part}", chosen, "give an object of parameters")
            for name, value in chosen.items():
                _check(f"sampling.{part}.{name}", name, value)
        cap = self.max_tokens
        if cap is not None and (not isinstance(cap, int) or isinstance(cap, bool) or cap <= 0):
            raise _wrong("sampling.max_tokens", cap, "give a whole number above 0, or leave it out")

    def chosen(self, said: Mapping[str, Any]) -> dict[str, float]:
        """What the session decides for a request whose body says this."""
        return {name: value for name, value in self.defaults.items() if said.get(name) is None} | dict(self.overrides)


_Parsed = TypeVar("_Parsed", SessionLimits, SessionSampling)


def parse(kind: type[_Parsed], key: str, given: object) -> _Parsed:
    """Limits or Sampling from JSON; raises Refusal naming the key, the value and the way out."""
    if given is None:
        return kind()
    if not isinstance(given, Mapping):
        raise _wrong(key, given, "give an object")
    names = [one.name for one in fields(kind)]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise _wrong(f"{key}.{unknown[0]}", given[unknown[0]], f"there is no such setting; choose from {names}")
    return kind(**given)


def _check(key: str, name: str, value: Any) -> None:
    if name not in SAMPLED:
        raise _wrong(key, value, f"there is no such parameter; choose from {list(SAMPLED)}")
    low, high = SAMPLED[name]
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _wrong(key, value, "give a number")
    if (low is not None and value < low) or (high is not None and value > high):
        raise _wrong(key, value, f"it lies outside {low} to {high}")


def _wrong(key: str, value: object, way_out: str) -> ApiError:
    return ApiError(ErrorCode.MALFORMED, f"{key}={value!r}: {way_out}", param=key)


class SessionState(StrEnum):
    """Whether a session takes calls."""

    OPEN = "open"
    """it does"""
    CLOSED = "closed"
    """it was ended"""
    EXPIRED = "expired"
    """its time was over"""


def hashed(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass(eq=False)
class Session:
    """One session. `deadline` in seconds of the table's clock; `tokens` generated so far.

    `requests` numbers what was admitted, repetitions too; `turns` counts what the quota does.
    """

    session_id: str
    uid: str
    key_hash: bytes
    _: KW_ONLY
    limits: SessionLimits = field(default_factory=SessionLimits)
    sampling: SessionSampling = field(default_factory=SessionSampling)
    metadata: dict[str, Any] = field(default_factory=dict)
    opened_at: float = 0.0
    state: SessionState = SessionState.OPEN
    reason: str = ""
    requests: int = 0
    turns: int = 0
    tokens: int = 0
    running: int = 0
    memory: PrefixIndex = field(default_factory=PrefixIndex)
    attempts: Attempts = field(default_factory=Attempts)

    @property
    def deadline(self) -> float | None:
        return None if self.limits.lifetime is None else self.opened_at + self.limits.lifetime

    @property
    def tokens_left(self) -> int | None:
        return None if self.limits.max_tokens is None else max(self.limits.max_tokens - self.tokens, 0)

    def count(self, tokens: int) -> None:
        """Tokens were generated in it."""
        self.tokens += tokens

    def call_budget(self) -> int | None:
        """Tokens one more call may generate; None without a bound."""
        bounds = [bound for bound in (self.sampling.max_tokens, self.tokens_left) if bound is not None]
        return min(bounds, default=None)

    def view(self) -> dict[str, Any]:
        """What an admin is told."""
        return {
            "session_id": self.session_id,
            "uid": self.uid,
            "state": str(self.state),
            "reason": self.reason,
            "turns": self.turns,
            "tokens": self.tokens,
            "running": self.running,
            "metadata": self.metadata,
        }
