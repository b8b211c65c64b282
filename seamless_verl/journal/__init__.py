"""The journal: the durable record of sessions, written before an agent receives a reply."""

from __future__ import annotations

from seamless_verl.journal.events import (
    BEGUN,
    LEASED,
    RUN,
    UNDONE,
    CallEnded,
    CallStarted,
    ChunkAppended,
    Event,
    GroupDecided,
    GroupOutcome,
    HandedOver,
    HandOverBegun,
    ImageAdded,
    OutsideEvent,
    RequestRefused,
    RewardPosted,
    SessionClosed,
    SessionOpened,
)
from seamless_verl.journal.reader import JournalReader
from seamless_verl.journal.stored import (
    CompactionResult,
    SessionSummary,
    Stage,
    StoredCall,
    StoredSession,
)
from seamless_verl.journal.writer import SqliteJournal

__all__ = [
    "BEGUN",
    "LEASED",
    "RUN",
    "UNDONE",
    "CallEnded",
    "CallStarted",
    "ChunkAppended",
    "CompactionResult",
    "Event",
    "GroupDecided",
    "GroupOutcome",
    "HandOverBegun",
    "HandedOver",
    "ImageAdded",
    "JournalReader",
    "OutsideEvent",
    "RequestRefused",
    "RewardPosted",
    "SessionClosed",
    "SessionOpened",
    "SessionSummary",
    "SqliteJournal",
    "Stage",
    "StoredCall",
    "StoredSession",
]
