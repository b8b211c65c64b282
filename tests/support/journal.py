"""Events, and journals to append them to, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.session import Session
from seamless_verl.journal import CallEnded, CallStarted, ChunkAppended, Event, SessionOpened, SqliteJournal
from seamless_verl.trajectory.records import Finish, TokenChunk, logprobs, tokens


def session_opened(session_id: str = "s", uid: str = "u") -> SessionOpened:
    return SessionOpened(session_id, uid, {"model": "m"}, 1.5)


def call_started(session_id: str = "s", call_id: str = "c", prompt: Sequence[int] = (1, 2, 3)) -> CallStarted:
    return CallStarted(session_id, call_id, f"digest of {call_id}", tokens(prompt), {"messages": [{"role": "user"}]})


def chunk_appended(ids: Sequence[int], call_id: str = "c", version: int = 0, replica: str = "r0") -> ChunkAppended:
    return ChunkAppended(call_id, TokenChunk(tokens(ids), logprobs([-0.25 * (i % 7) for i in ids]), version, replica))


def call_ended(call_id: str = "c") -> CallEnded:
    return CallEnded(call_id, Finish.STOP, {"content": f"reply to {call_id}"})


def write(journal: SqliteJournal, *events: Event) -> None:
    """Appends and waits, without an event loop."""
    journal.submit(*events).result(timeout=30)


def open_journal(folder: Path) -> SqliteJournal:
    return SqliteJournal(folder / "journal.sqlite")


def generated_ids(journal: SqliteJournal, session_id: str = "s") -> list[list[int]]:
    """The generated ids of each call of a session."""
    record = journal.read(session_id)
    assert record is not None
    return [[token for segment in call.segments for token in segment.ids] for call in record.calls]


class NullRecorder(JournalRecorder):
    """A recorder that keeps nothing, of a gateway without calls."""

    def __init__(self) -> None: ...

    async def open_session(self, session: Session) -> None: ...

    async def post_reward(self, session: Session, name: str, value: float) -> None: ...

    def find_turn(self, session: Session, reply_id: str) -> str | None:
        return None

    async def close_session(self, session: Session, reason: str) -> None: ...
