"""Sessions, calls and deltas for the journal's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seamless_verl.journal import CallEnded, CallStarted, Delta, Event, SessionOpened, SqliteJournal
from seamless_verl.trajectory.records import Finish, logprobs, tokens


def opened(session_id: str = "s", uid: str = "u") -> SessionOpened:
    return SessionOpened(session_id, uid, {"model": "m"}, 1.5)


def started(session_id: str = "s", call_id: str = "c", prompt: Sequence[int] = (1, 2, 3)) -> CallStarted:
    return CallStarted(session_id, call_id, f"digest of {call_id}", tokens(prompt), {"messages": [{"role": "user"}]})


def delta(ids: Sequence[int], call_id: str = "c", version: int = 0, replica: str = "r0") -> Delta:
    return Delta(call_id, tokens(ids), logprobs([-0.25 * (i % 7) for i in ids]), version, replica)


def ended(call_id: str = "c") -> CallEnded:
    return CallEnded(call_id, Finish.STOP, {"content": f"reply to {call_id}"})


def write(journal: SqliteJournal, *events: Event) -> None:
    """Append and wait, without an event loop."""
    journal.submit(*events).result(timeout=30)


def journal_at(folder: Path) -> SqliteJournal:
    return SqliteJournal(folder / "journal.sqlite")


def generated(journal: SqliteJournal, session_id: str = "s") -> list[list[int]]:
    """The generated ids of each call of a session."""
    record = journal.read(session_id)
    assert record is not None
    return [[token for segment in call.segments for token in segment.ids] for call in record.calls]
