"""The journal's interface, and the sessions and calls that it returns.

Every journal guarantees:
1. An append that has resolved survives the death of any process, completely: all its events or none. After a power
   failure the file is valid, but the last moments before it may be missing.
2. Appends take effect in the order of the calls to `append` in one thread.
3. A session that was open is restored with every acknowledged token and continues under its own id.
4. A closed session can be read completely until it was handed over: its consumer may receive it again, and counts it
   once.
5. Only sessions that were handed over are ever deleted.

Hand-over of a session: journal and consumer share no transaction, so the journal records three stages. CLOSED: the
consumer has received nothing. HANDING, recorded before the consumer receives anything: it is unknown how much it has,
so it receives the whole session again. That overwrites what it has, because its keys depend on the session alone.
HANDED, recorded when the consumer has everything: it never receives the session again.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from seamless_verl.journal.events import Event, GroupOutcome, RequestRefused
from seamless_verl.trajectory.records import Finish, Segment, Turn


class Journal(Protocol):
    """A durable record of events.

    Only `append` and `compact` may be called in a running event loop; the other methods read the file and block.
    """

    def append(self, *events: Event) -> Awaitable[None]:
        """Queues these events now; the returned awaitable resolves when all of them are durable.

        Concurrent appends share one transaction. Cancelling the awaitable does not withdraw the events.

        Raises:
            JournalOrderError: (awaited) one cannot follow what is on record; none was written, the journal is usable.
            JournalError: (awaited, or at once) the disk failed, now or earlier, or the journal is closed.
        """
        ...

    def restore(self) -> tuple[StoredSession, ...]:
        """All open sessions, oldest first."""
        ...

    def stage(self, session_id: str) -> Stage | None:
        """The session's stage; None if it is unknown or deleted."""
        ...

    def read(self, session_id: str) -> StoredSession | None:
        """The whole session; None if it is unknown or deleted."""
        ...

    def sessions(self) -> tuple[SessionSummary, ...]:
        """All sessions on record, oldest first."""
        ...

    def compact(
        self, before: float, max_bytes: int | None = None, keep: Collection[str] = ()
    ) -> Awaitable[CompactionResult]:
        """Deletes what is older than that, then the oldest while over `max_bytes`.

        That is sessions that were handed over, but those of `keep`, and before these the events from outside of the
        run that no restart needs.
        """
        ...

    def close(self) -> None:
        """Makes durable what was appended, then refuses everything else; a second close does nothing."""
        ...


class Stage(StrEnum):
    """A session's stage. The order is the order of its life, and a session never returns to an earlier stage."""

    OPEN = "open"
    """its agent runs, or continues after a restart"""
    CLOSED = "closed"
    """it accepts no more calls; no consumer has received it"""
    HANDING = "handing"
    """its hand-over has begun: the consumer may have received all, a part or nothing"""
    HANDED = "handed"
    """its consumer has it; compaction may delete it"""


@dataclass(frozen=True)
class StoredCall:
    """A call as the journal has it; `finish` is None if it has no end.

    `segments` are maximal: no two neighbours have the same version and replica, and none is empty.
    """

    call_id: str
    digest: str
    prompt_ids: array[int]
    segments: Sequence[Segment]
    finish: Finish | None
    request: dict[str, Any]
    reply: dict[str, Any]

    @property
    def interrupted(self) -> bool:
        """Whether it has no end, for example after a restart; it may continue while its session is open."""
        return self.finish is None

    def turn(self) -> Turn:
        """The call as a turn; a call without an end is a cancelled turn."""
        return Turn(
            turn_id=self.call_id,
            prompt_ids=self.prompt_ids,
            segments=self.segments,
            finish=self.finish or Finish.CANCELLED,
            request=self.request,
            reply=self.reply,
        )


@dataclass(frozen=True)
class StoredGroup:
    """What became of a session's group after the hand-over, in the trainer's step."""

    outcome: GroupOutcome
    step: int
    details: Mapping[str, Any]


@dataclass(frozen=True)
class StoredSession:
    """A session with its calls in the order in which they were recorded; `reason` is why it was closed.

    `refused` are its requests that got an error. `handing` and `handed` are the notes of its hand-over's begin and end,
    `group` what became of its group. `rewards` has those that were posted, also in `posted`, and those that it was
    given when it was handed over.
    """

    session_id: str
    uid: str
    settings: dict[str, Any]
    opened_at: float
    stage: Stage
    reason: str | None
    calls: Sequence[StoredCall]
    rewards: Mapping[str, float]
    refused: Sequence[RequestRefused] = ()
    handing: Mapping[str, Any] = field(default_factory=dict)
    handed: Mapping[str, Any] = field(default_factory=dict)
    group: StoredGroup | None = None
    posted: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def validation(self) -> bool:
        """Whether it was a session of a validation, which is not trained."""
        return is_validation(self.settings)

    @property
    def outcome(self) -> str:
        """What became of it, in a word or two, as in `SessionSummary`."""
        return outcome_of(self.stage, self.validation, self.handed, self.group)


@dataclass(frozen=True)
class EndedSession:
    """A session that is not open, without its calls: `handing` and `handed` as in StoredSession.

    It generated so many `tokens`, by weights of the versions from `oldest` to `newest`; None if it generated none.
    """

    session_id: str
    uid: str
    settings: Mapping[str, Any]
    stage: Stage
    reason: str
    tokens: int
    oldest: int | None
    newest: int | None
    handing: Mapping[str, Any]
    handed: Mapping[str, Any]
    group: StoredGroup | None

    @property
    def validation(self) -> bool:
        """Whether it was a session of a validation, which is not trained."""
        return is_validation(self.settings)


@dataclass(frozen=True)
class SessionSummary:
    """One session in brief: `tokens` counts generated tokens, `reason` is why it was closed.

    `outcome` is what became of it: `step <n>` in which it was trained, `validation`, `dropped`, that of its group if
    the group was dropped later, `queued` while it waits to be trained, `-` before its hand-over or where it is unknown.
    """

    session_id: str
    uid: str
    stage: Stage
    opened_at: float
    calls: int
    tokens: int
    reason: str | None
    outcome: str = "-"


def is_validation(settings: Mapping[str, Any]) -> bool:
    """Whether these are the settings of a session of a validation."""
    metadata = settings.get("metadata")
    return isinstance(metadata, Mapping) and metadata.get("validation") is True


def outcome_of(stage: Stage, validation: bool, handed: Mapping[str, Any], group: StoredGroup | None) -> str:
    """What became of a session; see `SessionSummary`."""
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
