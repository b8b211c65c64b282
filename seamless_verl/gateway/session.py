"""One session as the gateway knows it; what was said in it is the recorder's."""

from __future__ import annotations

import hashlib
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Any

from seamless_verl.gateway.limits import Limits, Sampling
from seamless_verl.gateway.memory import Memory
from seamless_verl.gateway.retries import Attempts


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
    limits: Limits = field(default_factory=Limits)
    sampling: Sampling = field(default_factory=Sampling)
    metadata: dict[str, Any] = field(default_factory=dict)
    opened_at: float = 0.0
    state: SessionState = SessionState.OPEN
    reason: str = ""
    requests: int = 0
    turns: int = 0
    tokens: int = 0
    running: int = 0
    memory: Memory = field(default_factory=Memory)
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
