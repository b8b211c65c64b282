"""One session of an agent: its limits, its sampling settings and its counters; its turns are the recorder's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from annotated_types import Ge, Le

from seamless_verl.gateway.calls import RepeatableCalls
from seamless_verl.gateway.prefix_index import PrefixIndex
from seamless_verl.gateway.retries import Attempts
from seamless_verl.gateway.stored_responses import StoredResponses
from seamless_verl.journal.stored import is_validation
from seamless_verl.runtime.fields import Positive, PositiveNumber, Seed, SettingsNode, check


@dataclass(frozen=True)
class SessionLimits(SettingsNode):
    """Bounds of one session; None is no bound. Raises ConfigError for one that is not a number above 0."""

    max_turns: Positive | None = None
    max_tokens: Positive | None = None  # generated; calls that run at once may together exceed it
    max_concurrent: Positive | None = None
    lifetime: PositiveNumber | None = None  # seconds from its opening

    def __post_init__(self) -> None:
        check(self, key="limits")


@dataclass(frozen=True)
class SamplingParameters(SettingsNode):
    """The sampling parameters that a session can set, named as in vLLM; None is not set."""

    temperature: Annotated[float, Ge(0)] | None = None
    top_p: Annotated[float, Ge(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(-1)] | None = None
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    repetition_penalty: Annotated[float, Ge(0)] | None = None
    presence_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    seed: Seed | None = None

    def set_ones(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class SessionSampling(SettingsNode):
    """How a session samples: `defaults` where a request sets nothing, `overrides` always; `max_tokens` of a call."""

    defaults: SamplingParameters = field(default_factory=SamplingParameters)
    overrides: SamplingParameters = field(default_factory=SamplingParameters)
    max_tokens: Positive | None = None

    def resolve(self, body: Mapping[str, Any]) -> dict[str, float]:
        """The parameters that the session sets for a request with this body."""
        defaults = {name: value for name, value in self.defaults.set_ones().items() if body.get(name) is None}
        return defaults | self.overrides.set_ones()

    def as_dict(self) -> dict[str, Any]:
        parts = {"defaults": self.defaults.set_ones(), "overrides": self.overrides.set_ones()}
        return {**parts, "max_tokens": self.max_tokens}


class SessionState(StrEnum):
    """Whether a session accepts calls."""

    OPEN = "open"  # it does
    CLOSED = "closed"  # it was closed
    EXPIRED = "expired"  # its lifetime is over


def seed_in(place: str, seed: int) -> int:
    """The engine's seed in a session at this place for one that was asked for: 0 to 2^62 - 1."""
    digest = hashlib.blake2b(f"{seed}@{place}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def hash_key(key: str) -> bytes:
    """The hash of a session's key, which is all that is kept of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass(eq=False)
class Session:
    """One session; its table sets `deadline` and `quiet_since`, by its clock."""

    session_id: str
    uid: str
    key_hash: bytes
    _: KW_ONLY
    limits: SessionLimits = field(default_factory=SessionLimits)
    sampling: SessionSampling = field(default_factory=SessionSampling)
    metadata: dict[str, Any] = field(default_factory=dict)
    awaited: bool = False  # an agent loop of the run waits for its end, and takes what it has
    opened_at: float = 0.0  # seconds since the epoch
    state: SessionState = SessionState.OPEN
    reason: str = ""
    requests: int = 0  # that were admitted, retries included
    turns: int = 0  # these without retries
    tokens: int = 0  # generated so far
    running: int = 0  # calls
    deadline: float | None = None  # when its lifetime is over
    quiet_since: float = 0.0  # its last call in this process, or its begin in it
    rewards: dict[str, float] = field(default_factory=dict)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    attempts: Attempts = field(default_factory=Attempts)
    responses: StoredResponses = field(default_factory=StoredResponses)
    images: dict[str, bytes] = field(default_factory=dict)  # the files in its calls' prompts, by sha256
    recorded_calls: RepeatableCalls | None = None  # of a lost session in the place of which this one is
    refused: int = 0  # requests that got an error
    failed_as: str = ""  # a reason to close it, if its agent fails: what its last request was refused for
    refused_outside: int = 0  # those of them that came as from a program outside of the run

    @property
    def validation(self) -> bool:
        """Whether it is of a validation, which is not trained."""
        return is_validation({"metadata": self.metadata})

    @property
    def remaining_tokens(self) -> int | None:
        """Tokens that it may still generate; None without a limit."""
        return None if self.limits.max_tokens is None else max(self.limits.max_tokens - self.tokens, 0)

    @property
    def place(self) -> str:
        """What it has in common with a session that begins it again, and with no other sample of its prompt.

        Its id, if no trainer asked for it. A prompt has another uid in each validation, which is to repeat its noise.
        """
        number = self.metadata.get("session")
        if not isinstance(number, str):
            return self.session_id
        return number if self.validation else f"{self.uid}_{number}"

    def seeded(self, sampling: Mapping[str, Any], choice: int = 0) -> dict[str, Any]:
        """The sampling fields for an engine: a seed gives this session its own noise, the same at each repetition.

        Equal samples of a prompt teach nothing. vLLM has added the request's `choice` to the seed; so it is with ours.
        """
        if sampling.get("seed") is None:
            return dict(sampling)
        return {**sampling, "seed": seed_in(self.place, sampling["seed"] - choice) + choice}

    def call_budget(self) -> int | None:
        """Tokens that one more call may generate; None without a limit."""
        bounds = [bound for bound in (self.sampling.max_tokens, self.remaining_tokens) if bound is not None]
        return min(bounds, default=None)

    def stored_settings(self) -> dict[str, Any]:
        """What a restart needs of the session besides its calls."""
        return {
            "key": self.key_hash.hex(),
            "limits": asdict(self.limits),
            "sampling": self.sampling.as_dict(),
            "metadata": self.metadata,
            "awaited": self.awaited,
        }

    def describe(self) -> dict[str, Any]:
        """The session as the admin API shows it."""
        shown = ("session_id", "uid", "state", "reason", "turns", "tokens", "running", "metadata")
        return {name: getattr(self, name) for name in shown}
