"""What a journal returns: sessions and their calls, and the session records rebuilt from these.

Hand-over of a session: journal and consumer share no transaction, so the journal records three stages. CLOSED: the
consumer has received nothing. HANDING, recorded before the consumer receives anything: it is unknown how much it has,
so it receives the whole session again. That overwrites what it has, because its keys depend on the session alone.
HANDED, recorded when the consumer has everything: it never receives the session again.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from seamless_verl.journal.events import GroupOutcome, RequestRefused
from seamless_verl.trajectory.records import Finish, Segment, Turn
from seamless_verl.trajectory.routes import Routes
from seamless_verl.trajectory.session import Closed, SessionRecord


class Stage(StrEnum):
    """A session's stage. The order is the order of its life, and a session never returns to an earlier stage."""

    OPEN = "open"  # its agent runs, or continues after a restart
    CLOSED = "closed"  # it accepts no more calls; no consumer has received it
    HANDING = "handing"  # its hand-over has begun: the consumer may have received all, a part or nothing
    HANDED = "handed"  # its consumer has it; compaction may delete it


@dataclass(frozen=True)
class StoredCall:
    """A call as the journal has it; `finish` is None if it has no end.

    `segments` are maximal: no two neighbours have the same version and replica, and none is empty. They and the prompt
    have routes until the journal had to delete them, after the hand-over.
    """

    call_id: str
    digest: str
    prompt_ids: array[int]
    segments: Sequence[Segment]
    finish: Finish | None
    request: dict[str, Any]
    reply: dict[str, Any]
    prompt_routes: Routes | None = None

    @property
    def interrupted(self) -> bool:
        """Whether it has no end, for example after a restart; it may continue while its session is open."""
        return self.finish is None

    def turn(self) -> Turn:
        """The call as a turn; a call without an end is a cancelled turn."""
        finish = self.finish or Finish.CANCELLED
        known = (self.prompt_ids, self.segments, finish, self.request, self.reply, self.prompt_routes)
        return Turn(self.call_id, *known)


@dataclass(frozen=True)
class StoredGroup:
    """What became of a session's group after the hand-over, in the trainer's step."""

    outcome: GroupOutcome
    step: int
    details: Mapping[str, Any]


@dataclass(frozen=True)
class StoredSession:
    """A session with its calls in the order in which they were recorded."""

    session_id: str
    uid: str
    settings: dict[str, Any]
    opened_at: float
    stage: Stage
    reason: str | None  # why it was closed
    calls: Sequence[StoredCall]
    rewards: Mapping[str, float]  # those that were posted, and those that it was given when it was handed over
    refused: Sequence[RequestRefused] = ()
    handing: Mapping[str, Any] = field(default_factory=dict)  # the note of its hand-over's begin
    handed: Mapping[str, Any] = field(default_factory=dict)  # and of its end
    group: StoredGroup | None = None
    posted: Mapping[str, float] = field(default_factory=dict, compare=False)  # of the rewards
    images: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # the files in its prompts, by sha256

    @property
    def validation(self) -> bool:
        """Whether it was a session of a validation, which is not trained."""
        return is_validation(self.settings)

    @property
    def outcome(self) -> str:
        """What became of it, in a word or two."""
        return outcome_of(self.stage, self.validation, self.handed, self.group)

    def summary(self) -> SessionSummary:
        segments = [segment for call in self.calls for segment in call.segments]
        versions = [segment.version for segment in segments]
        return SessionSummary(
            self.session_id,
            self.uid,
            self.settings,
            self.stage,
            self.reason,
            self.opened_at,
            len(self.calls),
            sum(map(len, segments)),
            min(versions, default=None),
            max(versions, default=None),
            self.handing,
            self.handed,
            self.group,
        )


@dataclass(frozen=True)
class SessionSummary:
    """A session without its calls, but with what they add up to."""

    session_id: str
    uid: str
    settings: Mapping[str, Any]
    stage: Stage
    reason: str | None = None  # why it was closed
    opened_at: float = 0.0
    calls: int = 0
    tokens: int = 0  # generated
    oldest: int | None = None  # of the weight versions that generated them
    newest: int | None = None
    handing: Mapping[str, Any] = field(default_factory=dict)  # the note of its hand-over's begin
    handed: Mapping[str, Any] = field(default_factory=dict)  # and of its end
    group: StoredGroup | None = None

    @property
    def validation(self) -> bool:
        """Whether it was a session of a validation, which is not trained."""
        return is_validation(self.settings)

    @property
    def outcome(self) -> str:
        """What became of it, in a word or two."""
        return outcome_of(self.stage, self.validation, self.handed, self.group)


def is_validation(settings: Mapping[str, Any]) -> bool:
    """Whether these are the settings of a session of a validation."""
    metadata = settings.get("metadata")
    return isinstance(metadata, Mapping) and metadata.get("validation") is True


def outcome_of(stage: Stage, validation: bool, handed: Mapping[str, Any], group: StoredGroup | None) -> str:
    """What became of a session.

    `step <n>` in which it was trained, `validation`, `dropped`, that of its group if the group was dropped later,
    `queued` while it waits to be trained, `-` before its hand-over or where it is unknown.
    """
    if stage is not Stage.HANDED or "kept" not in handed:
        return "-"
    if not handed["kept"]:
        return "dropped"
    if validation:
        return "validation"
    if group is None:
        return "queued"
    return f"step {group.step}" if group.outcome is GroupOutcome.TRAINED else str(group.outcome)


@dataclass(frozen=True)
class CompactionResult:
    """The number of deleted sessions, and the bytes that the file uses now."""

    sessions: int
    used_bytes: int


def rebuild_record(stored: StoredSession, *, all_calls: bool = False) -> SessionRecord:
    """The session's record, as after a restart: its turns in the order of its calls in the journal.

    Calls without an end are CANCELLED. An open session has none of them, because they may continue, unless `all_calls`
    is set, as to show it.
    """
    record = SessionRecord(stored.uid, stored.session_id, validation=stored.validation, images=dict(stored.images))
    for call in stored.calls:
        if all_calls or not call.interrupted or stored.stage is not Stage.OPEN:
            record.add_turn(call.turn())
    for name, value in stored.rewards.items():
        record.post_reward(value, name)
    if stored.stage is not Stage.OPEN:
        record.close(parse_close_reason(stored.reason or ""))
    return record


def parse_close_reason(reason: str) -> Closed:
    """The kind of a session's reason to close; any other text, such as an administrator's, is FINISHED."""
    return Closed(reason) if reason in set(Closed) else Closed.FINISHED
