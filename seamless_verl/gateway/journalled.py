"""The recorder that journals: what it has returned from survives the gateway's death.

Owned state: the record of each session from its opening until it is taken, and the segments of the
calls that run. Invariant: a session's record holds the turns that the journal has an end for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Protocol

from seamless_verl.gateway.seam import SessionCall
from seamless_verl.gateway.session import Session, SessionState
from seamless_verl.rollout.calls import Piece
from seamless_verl.trajectory.drift import Decode
from seamless_verl.trajectory.journal import (
    CallEnded,
    CallStarted,
    Delta,
    Event,
    RewardPosted,
    SessionClosed,
    SessionOpened,
)
from seamless_verl.trajectory.records import Finish, Segment, Turn, logprobs, tokens
from seamless_verl.trajectory.session import Closed, SessionRecord


class Appends(Protocol):
    """All that a recorder asks of a journal."""

    def append(self, *events: Event) -> Awaitable[None]: ...


class JournalRecorder:
    """Journals first, then keeps. `on_closed` hears of each session that takes no more calls."""

    def __init__(
        self, journal: Appends, *, decode: Decode | None = None, on_closed: Callable[[str], None] = lambda _: None
    ) -> None:
        self._journal, self._decode, self._on_closed = journal, decode, on_closed
        self._records: dict[str, SessionRecord] = {}
        self._running: dict[str, list[Segment]] = {}

    async def opened(self, session: Session) -> None:
        await self._journal.append(SessionOpened(session.session_id, session.uid, settings(session), session.opened_at))
        self._records[session.session_id] = SessionRecord(session.uid, session.session_id, decode=self._decode)

    async def started(self, call: SessionCall) -> None:
        self._running[call.call_id] = []
        await self._journal.append(
            CallStarted(call.session_id, call.call_id, call.digest, call.prompt_ids, call.request)
        )

    async def piece(self, call: SessionCall, piece: Piece) -> None:
        if piece.ids:
            await self._journal.append(Delta(call.call_id, piece.ids, piece.logprobs, piece.version, piece.replica))
            extend(self._running[call.call_id], piece)

    async def ended(self, call: SessionCall, finish: Finish, reply: dict[str, Any]) -> None:
        await self._journal.append(CallEnded(call.call_id, finish, reply))
        segments = self._running.pop(call.call_id)
        turn = Turn(call.call_id, call.prompt_ids, segments, finish, call.request, reply)
        self._records[call.session_id].add_turn(turn)

    async def rewarded(self, session: Session, name: str, value: float) -> None:
        await self._journal.append(RewardPosted(session.session_id, name, value))
        self._records[session.session_id].post_reward(value, name)

    async def closed(self, session: Session, reason: str) -> None:
        await self._journal.append(SessionClosed(session.session_id, reason))
        expired = session.state is SessionState.EXPIRED
        known = Closed(reason) if reason in set(Closed) else Closed.FINISHED
        self._records[session.session_id].close(Closed.EXPIRED if expired else known)
        self._on_closed(session.session_id)

    def record(self, session_id: str) -> SessionRecord:
        """The session as it stands; raises KeyError for one that was taken, or is not ours."""
        return self._records[session_id]

    def take(self, session_id: str) -> SessionRecord:
        """The record of a closed session, which is not kept here any longer."""
        assert not self._records[session_id].is_open, f"session {session_id} is open; close it first"
        return self._records.pop(session_id)


def extend(segments: list[Segment], piece: Piece) -> None:
    """Put a piece at the end: a segment is maximal, so that it joins the last one of its version and replica."""
    if segments and (segments[-1].version, segments[-1].replica) == (piece.version, piece.replica):
        segments[-1].ids.extend(piece.ids)
        segments[-1].logprobs.extend(piece.logprobs)
    else:
        segments.append(Segment(tokens(piece.ids), logprobs(piece.logprobs), piece.version, piece.replica))


def settings(session: Session) -> dict[str, Any]:
    """What a restart needs of a session beside what was said in it."""
    return {
        "key": session.key_hash.hex(),
        "limits": asdict(session.limits),
        "sampling": asdict(session.sampling),
        "metadata": session.metadata,
    }
