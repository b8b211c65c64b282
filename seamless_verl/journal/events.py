"""The events that a journal records. Times are seconds since the epoch; dicts are plain JSON values.

A session's id is unique in its journal for ever; a call's id is unique among the open calls. The journal keeps
references to arrays until the append is durable, so a caller must not change an array after it appended it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from seamless_verl.trajectory.records import Finish, TokenChunk


@dataclass(frozen=True)
class SessionOpened:
    """An agent began to run on the prompt `uid`."""

    session_id: str
    uid: str
    settings: dict[str, Any]
    opened_at: float


@dataclass(frozen=True)
class CallStarted:
    """A request was rendered to `prompt_ids` (int32). `digest` is of the request's content and identifies retries."""

    session_id: str
    call_id: str
    digest: str
    prompt_ids: array[int]
    request: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChunkAppended:
    """A replica generated these tokens for the call."""

    call_id: str
    chunk: TokenChunk


@dataclass(frozen=True)
class CallEnded:
    """The call has all its tokens; `reply` is what the agent is about to receive."""

    call_id: str
    finish: Finish
    reply: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardPosted:
    """A reward of the session. The last one of a name counts. Accepted until the hand-over begins."""

    session_id: str
    name: str
    value: float


@dataclass(frozen=True)
class SessionClosed:
    """The session accepts no more calls; calls still open never get an end."""

    session_id: str
    reason: str


@dataclass(frozen=True)
class HandOverBegun:
    """The closed session is about to be given to its consumer."""

    session_id: str


@dataclass(frozen=True)
class HandedOver:
    """The consumer has the whole session. Compaction may delete it when the retention after `handed_over_at` ends."""

    session_id: str
    handed_over_at: float


Event: TypeAlias = (
    SessionOpened | CallStarted | ChunkAppended | CallEnded | RewardPosted | SessionClosed | HandOverBegun | HandedOver
)
