"""What a journal is told. Times are seconds since the epoch; dicts are plain JSON values.

A session's id is unique in its journal for ever, a call's among the open calls. Arrays are kept by
reference until the append is durable: whoever appends them changes them no more.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from seamless_verl.trajectory.records import Finish, check_pairs


@dataclass(frozen=True)
class SessionOpened:
    """An agent began to run on the prompt `uid`."""

    session_id: str
    uid: str
    settings: dict[str, Any]
    opened_at: float


@dataclass(frozen=True)
class CallStarted:
    """A request was rendered to `prompt_ids` (int32); `digest` is of the request's content, for retries."""

    session_id: str
    call_id: str
    digest: str
    prompt_ids: array[int]
    request: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Delta:
    """Tokens as a replica produced them: int32 ids, one float32 logprob (nats) each, one weight version.

    Raises:
        ValueError: it has not exactly one logprob for each id.
    """

    call_id: str
    ids: array[int]
    logprobs: array[float]
    version: int
    replica: str

    def __post_init__(self) -> None:
        check_pairs("delta", self.ids, self.logprobs)


@dataclass(frozen=True)
class CallEnded:
    """The call has all its tokens; `reply` is what the agent is going to read."""

    call_id: str
    finish: Finish
    reply: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardPosted:
    """A reward of the session; of two with one name, the later counts. Accepted until the hand-over begins."""

    session_id: str
    name: str
    value: float


@dataclass(frozen=True)
class SessionClosed:
    """Nothing more is said in this session; calls still open stay cut."""

    session_id: str
    reason: str


@dataclass(frozen=True)
class HandOverBegun:
    """The consumer is about to be given this closed session."""

    session_id: str


@dataclass(frozen=True)
class HandedOver:
    """The consumer has this session; compaction may delete it `handed_at` plus the retention later."""

    session_id: str
    handed_at: float


Event: TypeAlias = (
    SessionOpened | CallStarted | Delta | CallEnded | RewardPosted | SessionClosed | HandOverBegun | HandedOver
)
