"""From the journal back to the record that trajectories are assembled from, as after a restart.

A consumer is given every session once, whichever process dies when: a session that was closed and not handed over
is found in the journal, rebuilt here as it was, and given again under the same key. See `handover` for why that is
once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from seamless_verl.errors import JournalOrderError
from seamless_verl.trajectory.drift import Decode
from seamless_verl.trajectory.journal.handover import Handover
from seamless_verl.trajectory.journal.protocol import Journal
from seamless_verl.trajectory.journal.recorded import SessionRecord as Journalled
from seamless_verl.trajectory.journal.recorded import Stage
from seamless_verl.trajectory.session import Closed, SessionRecord


def closed_as(reason: str) -> Closed:
    """What a session's reason to end counts as; an admin's own words are FINISHED."""
    return Closed(reason) if reason in set(Closed) else Closed.FINISHED


def replay(left: Journalled, *, decode: Decode | None = None) -> SessionRecord:
    """The session as it was, its turns in the order of its calls in the journal.

    In an open session calls without an end are left out, for they may go on; in a closed one they are CANCELLED.
    """
    record = SessionRecord(left.uid, left.session_id, decode=decode)
    for call in left.calls:
        if not call.cut or left.stage is not Stage.OPEN:
            record.add_turn(call.turn())
    for name, value in left.rewards.items():
        record.post_reward(value, name)
    if left.stage is not Stage.OPEN:
        record.close(closed_as(left.reason or ""))
    return record


def closed_session(journal: Journal, session_id: str, *, decode: Decode | None = None) -> SessionRecord:
    """A session that was closed and not handed over, for a consumer that asks again; reads, and so blocks.

    Raises:
        JournalOrderError: it is open, unknown, or was handed over.
    """
    left = journal.read(session_id)
    if left is None or left.stage not in (Stage.CLOSED, Stage.HANDING):
        stage = "unknown" if left is None else left.stage
        raise JournalOrderError("taking", session_id, f"the session is {stage}; it must be closed and not handed over")
    return replay(left, decode=decode)


async def hand_over_rest(
    journal: Journal,
    *,
    put: Callable[[SessionRecord], Awaitable[None]],
    already_there: Callable[[str], Awaitable[bool]],
    decode: Decode | None = None,
) -> tuple[str, ...]:
    """Gives the sessions that were closed and not handed over, oldest first; the ids of those that were put.

    Called once after a restart, before new sessions are closed. `put` and `already_there` are a `Handover`'s: `put`
    keeps a session whole under keys that are a function of it alone, `already_there` says whether the consumer
    holds, or has consumed, all of it.
    """

    async def rebuilt(left: Journalled) -> None:
        await put(replay(left, decode=decode))

    handover = Handover(journal, put=rebuilt, already_there=already_there)
    return tuple([session_id for session_id in journal.unhanded() if await handover.give(session_id)])
