"""From the journal back to the record that trajectories are assembled from, as after a restart.

A session that was closed and not handed over is rebuilt here as it was, to be given again under the same keys. See
`protocol` for why its consumer sees it once all the same.
"""

from __future__ import annotations

from seamless_verl.errors import JournalOrderError
from seamless_verl.journal.protocol import Journal, Stage
from seamless_verl.journal.protocol import StoredSession as Journalled
from seamless_verl.trajectory.session import Closed, SessionRecord


def closed_as(reason: str) -> Closed:
    """What a session's reason to end counts as; an admin's own words are FINISHED."""
    return Closed(reason) if reason in set(Closed) else Closed.FINISHED


def replay(left: Journalled) -> SessionRecord:
    """The session as it was, its turns in the order of its calls in the journal.

    In an open session calls without an end are left out, for they may go on; in a closed one they are CANCELLED.
    """
    record = SessionRecord(left.uid, left.session_id)
    for call in left.calls:
        if not call.cut or left.stage is not Stage.OPEN:
            record.add_turn(call.turn())
    for name, value in left.rewards.items():
        record.post_reward(value, name)
    if left.stage is not Stage.OPEN:
        record.close(closed_as(left.reason or ""))
    return record


def closed_session(journal: Journal, session_id: str) -> SessionRecord:
    """A session that was closed and not handed over, for a consumer that asks again; reads, and so blocks.

    Raises:
        JournalOrderError: it is open, unknown, or was handed over.
    """
    left = journal.read(session_id)
    if left is None or left.stage not in (Stage.CLOSED, Stage.HANDING):
        stage = "unknown" if left is None else left.stage
        raise JournalOrderError("taking", session_id, f"the session is {stage}; it must be closed and not handed over")
    return replay(left)
