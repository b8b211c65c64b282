"""What a journal gives back: sessions and their calls, ended or cut."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

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
class CallRecord:
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
class SessionRecord:
    """A session with its calls in the order in which they came into the journal."""

    session_id: str
    uid: str
    settings: dict[str, Any]
    opened_at: float
    stage: Stage
    reason: str | None
    calls: Sequence[CallRecord]
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
