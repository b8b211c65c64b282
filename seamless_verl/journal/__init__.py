"""The journal: what agents and the model said, on disk before an agent hears of it."""

from __future__ import annotations

from seamless_verl.journal.events import (
    CallEnded,
    CallStarted,
    Delta,
    Event,
    HandedOver,
    HandOverBegun,
    RewardPosted,
    SessionClosed,
    SessionOpened,
)
from seamless_verl.journal.protocol import Compacted, Journal, SessionSummary, Stage, StoredCall, StoredSession
from seamless_verl.journal.reader import JournalReader
from seamless_verl.journal.writer import SqliteJournal

__all__ = [
    "CallEnded",
    "CallStarted",
    "Compacted",
    "Delta",
    "Event",
    "HandOverBegun",
    "HandedOver",
    "Journal",
    "JournalReader",
    "RewardPosted",
    "SessionClosed",
    "SessionOpened",
    "SessionSummary",
    "SqliteJournal",
    "Stage",
    "StoredCall",
    "StoredSession",
]
