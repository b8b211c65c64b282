"""What a journal gives back: sessions and their calls, ended or cut.

What every journal promises.

1. An append that has resolved survives the death of any process, whole: all its events or none. After a power failure
   the file is sound, but the last moments before it may be missing.
2. Appends take effect in the order of the calls to `append` in one thread.
3. A session that was open is restored with every acknowledged token, and goes on under its own id.
4. A closed session can be read, whole, until it was handed over: its consumer may be given it again, and see it once.
5. Nothing but a session that was handed over is ever deleted.

Of a hand-over: journal and consumer share no transaction, so the journal notes three stages. CLOSED: the consumer was
given nothing of it. HANDING, noted before it is given anything: nobody knows how much it has, so it is given the whole
again, which overwrites what it has, because its keys are a function of the session alone. HANDED, noted once it has
everything: never given again.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from seamless_verl.journal.events import Event
from seamless_verl.trajectory.records import Finish, Segment, Turn


class Stage(StrEnum):
    """How far a session has come; the order is the order of life, and never runs back."""

    OPEN = "open"
    """its agent runs, or will go on after a restart"""
    CLOSED = "closed"
    """nothing more is said in it; nobody has been given it"""
    HANDING = "handing"
    """a consumer was about to be given it: it may or may not be there"""
    HANDED = "handed"
    """its consumer has it; compaction may delete it"""


@dataclass(frozen=True)
class StoredCall:
    """A call as far as the journal knows it; `finish` is None for one that was cut.

    `segments` are maximal: no two neighbours share version and replica, none is empty.
    """

    call_id: str
    digest: str
    prompt_ids: array[int]
    segments: Sequence[Segment]
    finish: Finish | None
    request: dict[str, Any]
    reply: dict[str, Any]

    @property
    def cut(self) -> bool:
        """Whether it stopped without an end, as by a restart; it may be continued while its session is open."""
        return self.finish is None

    def turn(self, cut_as: Finish = Finish.CANCELLED) -> Turn:
        """As a turn; a call without an end is given `cut_as`."""
        return Turn(
            turn_id=self.call_id,
            prompt_ids=self.prompt_ids,
            segments=self.segments,
            finish=self.finish or cut_as,
            request=self.request,
            reply=self.reply,
        )


@dataclass(frozen=True)
class StoredSession:
    """A session with its calls in the order in which they came into the journal."""

    session_id: str
    uid: str
    settings: dict[str, Any]
    opened_at: float
    stage: Stage
    reason: str | None
    calls: Sequence[StoredCall]
    rewards: Mapping[str, float]


@dataclass(frozen=True)
class SessionSummary:
    """One line about a session; `tokens` counts generated ones, `reason` is why it was closed."""

    session_id: str
    uid: str
    stage: Stage
    opened_at: float
    calls: int
    tokens: int
    reason: str | None


@dataclass(frozen=True)
class Compacted:
    """What a compaction did: sessions deleted, and bytes the file holds now."""

    sessions: int
    bytes_held: int


class Journal(Protocol):
    """Where events are kept. Only `append` and `compact` belong in a running event loop; the rest read, and block."""

    def append(self, *events: Event) -> Awaitable[None]:
        """Queue these events now; what is returned resolves once all are durable.

        Concurrent appends share one transaction. Cancelling the wait does not take the events back.

        Raises:
            JournalOrderError: (awaited) one cannot follow what is on record; none was written, the journal goes on.
            JournalError: (awaited, or at once) the disk failed, now or earlier, or the journal is closed.
        """
        ...

    def restore(self) -> tuple[StoredSession, ...]:
        """All open sessions, oldest first."""
        ...

    def stage(self, session_id: str) -> Stage | None:
        """How far it has come; None for one that is unknown or deleted."""
        ...

    def read(self, session_id: str) -> StoredSession | None:
        """All of one session; None for one that is unknown or deleted."""
        ...

    def sessions(self) -> tuple[SessionSummary, ...]:
        """All sessions on record, oldest first."""
        ...

    def compact(self, before: float, max_bytes: int | None = None) -> Awaitable[Compacted]:
        """Delete what was handed over before that time, then the oldest handed over while over `max_bytes`."""
        ...

    def close(self) -> None:
        """Make durable what was appended, then refuse all else; a second close does nothing."""
        ...
