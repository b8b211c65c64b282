"""The journal: what agents and the model said, on disk before an agent hears of it."""

from __future__ import annotations

from seamless_verl.trajectory.journal.events import (
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
from seamless_verl.trajectory.journal.protocol import Compacted, Journal
from seamless_verl.trajectory.journal.reader import JournalReader
from seamless_verl.trajectory.journal.recorded import CallRecord, SessionRecord, SessionSummary, Stage
from seamless_verl.trajectory.journal.sqlite import SqliteJournal

__all__ = [
    "CallEnded",
    "CallRecord",
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
    "SessionRecord",
    "SessionSummary",
    "SqliteJournal",
    "Stage",
]
