"""The events that a journal records. Times are seconds since the epoch; dicts are plain JSON values.

A session's id is unique in its journal for ever; a call's id is unique among the open calls. The journal keeps
references to arrays until the append is durable, so a caller must not change an array after it appended it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
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
class ImageAdded:
    """Calls of the session have this image, a file; one that is on record already is not stored again."""

    session_id: str
    digest: str  # sha256 of the file, in hex
    data: bytes


@dataclass(frozen=True)
class CallStarted:
    """A request was rendered to a prompt."""

    session_id: str
    call_id: str
    digest: str  # of the request's content; identifies retries
    prompt_ids: array[int]  # int32
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
    note: dict[str, Any] = field(default_factory=dict)  # the limits of its sequences, the policy for tokens of grammars


@dataclass(frozen=True)
class HandedOver:
    """The consumer has the whole session. Compaction may delete it when the retention after `handed_over_at` ends.

    `note`: whether it was `kept`, the `reason` if it was dropped or its agent failed, `rewards` given after its close.
    """

    session_id: str
    handed_over_at: float
    note: dict[str, Any] = field(default_factory=dict)


class GroupOutcome(StrEnum):
    """What became of a group that was handed over."""

    TRAINED = "trained"  # it was trained
    STALE = "stale"  # it was too old when the trainer could have taken it
    FILTERED = "filtered"
    """all its rewards were the same (`algorithm.filter_groups`), or a sampler dropped it: `reason` in its details"""
    FAILED = "failed"  # too few of its sessions could be trained
    DEFERRED = "deferred"
    """its step had enough groups without it: the prompt begins again under another uid (`seamless.tail_batching`)"""
    UNDONE = "undone"
    """its run went on from weights before that step: readers have no outcome of it, until it has another one"""


@dataclass(frozen=True)
class GroupDecided:
    """What became of the group of prompt `uid`, in the trainer's step; the last one of a prompt counts.

    `details` of a trained one: the token policy and the trainer's version that it was masked by; as `pivot` the session
    that an advantage estimator left out; as `advantages`, by session, the mean, the least and the greatest of its
    trained tokens. Journals without a session of this prompt leave it out.
    """

    uid: str
    outcome: GroupOutcome
    step: int
    details: dict[str, Any] = field(default_factory=dict)
    at: float = 0.0
    taken: float = 0.0  # when training took it; it is not stored


@dataclass(frozen=True)
class RequestRefused:
    """A request of the session got an error and no reply: its path, the HTTP status and the error's message."""

    session_id: str
    path: str
    status: int
    message: str
    at: float


@dataclass(frozen=True)
class OutsideEvent:
    """What programs outside of the run did, or were refused; `subject` is a lease, a session or an address.

    The events of kind `begun` each begin the record of one run. Events of a lease stay as long as a restart needs them:
    until its `session` is handed over, and none of an earlier run's.
    """

    kind: str
    subject: str
    detail: dict[str, Any]
    at: float


BEGUN = "begun"
RUN = "run"
"""The kinds of the events of a run's starts: its runner tasks began anew, and it went on from the weights of a version.
What a restarted data plane needs; there is one of each a start."""
LEASED = "leased"  # The kind of the event with which a lease begins; its detail names the lease's `session`
UNDONE = "undone"
"""The kind of an event whose subject is a session that was handed over, and what had its tokens is gone, as after a
stop of the whole run. Readers count it as dropped, for the `reason` of the event."""
SessionEvent: TypeAlias = SessionOpened | RewardPosted | RequestRefused | SessionClosed | HandOverBegun | HandedOver
Event: TypeAlias = SessionEvent | ImageAdded | CallStarted | ChunkAppended | CallEnded | OutsideEvent | GroupDecided
