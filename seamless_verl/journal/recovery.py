"""Rebuilds session records from the journal, as after a restart.

A session that was closed and not handed over is rebuilt unchanged, so that its consumer receives it again under the
same keys. `protocol` describes why the consumer still counts it once.
"""

from __future__ import annotations

from seamless_verl.errors import JournalOrderError
from seamless_verl.journal.protocol import Journal, Stage, StoredSession
from seamless_verl.trajectory.session import Closed, SessionRecord


def rebuild_record(stored: StoredSession, *, all_calls: bool = False) -> SessionRecord:
    """The session's record, its turns in the order of its calls in the journal.

    Calls without an end are CANCELLED. An open session has none of them, because they may continue, unless `all_calls`
    is set, as to show it.
    """
    record = SessionRecord(stored.uid, stored.session_id)
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


def read_closed_session(journal: Journal, session_id: str) -> SessionRecord:
    """The record of a session that was closed and not handed over; reads the file, and so blocks.

    Raises:
        JournalOrderError: it is open, unknown, or was handed over.
    """
    stored = journal.read(session_id)
    if stored is None or stored.stage not in (Stage.CLOSED, Stage.HANDING):
        stage = "unknown" if stored is None else stored.stage
        reason = f"the session is {stage}; it must be closed and not handed over"
        raise JournalOrderError("hand-over", session_id, reason)
    return rebuild_record(stored)
