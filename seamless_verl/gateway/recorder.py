"""What of the calls that run a journal is still to be told.

Owned state: the events of each call that wait, and the appends that are on their way.

Invariants:
- A call's events reach the journal in their order.
- What waits for nobody is told NOTED_S after its first token, or as soon after as the call's last append is done; that
  of many calls at once, for one commit costs as much.
- Who awaits an append hears what became of all earlier ones of its call.
- A call has at most one append on its way that nobody awaits: a journal that falls behind is not given more and more.

The recorder that journals: what it has returned from survives the gateway's death.

Owned state: the record of each session from its opening until it is taken, the segments of the calls that run, and
the calls that a restart cut, until a retry goes on with them or their session ends.

Invariants:
- A call is in the journal from its first tokens on, or from its end: an agent whose call a restart forgot has seen
  nothing of it.
- A session's record holds the turns that the journal has an end for, and their tokens are the journal's.
- A call's last tokens and its end are one append: no call has all its tokens on record and no end.
- When a session is closed, every call of it has an end on record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Protocol

from seamless_verl.errors import JournalError
from seamless_verl.gateway.protocols import SessionCall
from seamless_verl.gateway.resumed_calls import OWN
from seamless_verl.gateway.session import Session, SessionState
from seamless_verl.journal import (
    CallEnded,
    CallStarted,
    Delta,
    Event,
    RewardPosted,
    SessionClosed,
    SessionOpened,
    StoredCall,
)
from seamless_verl.journal import StoredSession as Journalled
from seamless_verl.journal.recovery import closed_as, replay
from seamless_verl.rollout.call import Piece
from seamless_verl.trajectory.records import Finish, Segment, Turn, logprobs, tokens
from seamless_verl.trajectory.session import Closed, SessionRecord

NOTED_S = 0.05  # of an engine's work that a crash may cost


class Appends(Protocol):
    """All that a recorder asks of a journal."""

    def append(self, *events: Event) -> asyncio.Future[None]: ...


class JournalBuffer:
    def __init__(self, journal: Appends) -> None:
        self._journal = journal
        self._events: dict[str, list[Event]] = {}
        self._written: dict[str, asyncio.Future[None]] = {}
        self._telling: asyncio.TimerHandle | None = None
        self._over: JournalError | None = None

    def begin(self, start: CallStarted) -> None:
        """Waits for the call's first token, or its end."""
        self._events[start.call_id] = [start]

    def note(self, tokens: Delta) -> None:
        """Told soon; raises JournalError when the journal takes nothing any more, or refused what it was told."""
        if self._over is not None:
            raise self._over
        if (earlier := self._written.get(tokens.call_id)) is not None and earlier.done():
            earlier.result()
        self._events.setdefault(tokens.call_id, []).append(tokens)
        self._tell_soon()

    def append(self, call_id: str, *events: Event) -> Awaitable[Any]:
        """Told now, after what waits; the result is of all that the call has been told with."""
        written = self._journal.append(*self._events.pop(call_id, ()), *events)
        earlier = self._written.pop(call_id, None)
        return asyncio.gather(earlier, written) if earlier is not None else written

    def _tell_soon(self) -> None:
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(NOTED_S, self._tell)

    def _tell(self) -> None:
        self._telling = None
        waiting = [name for name, events in self._events.items() if isinstance(events[-1], Delta)]
        try:
            for call_id in waiting:
                if self._heard(call_id):
                    self._written[call_id] = self._journal.append(*self._events.pop(call_id))
        except JournalError as error:  # it is over for good, as each call is told with its next piece
            self._over = error
            return
        if any(call_id in self._events for call_id in waiting):
            self._tell_soon()

    def _heard(self, call_id: str) -> bool:
        """Whether the call's last append went well: of one that did not its next piece is to hear, or its end."""
        earlier = self._written.get(call_id)
        return earlier is None or (earlier.done() and not earlier.cancelled() and earlier.exception() is None)


class JournalRecorder:
    """Journals first, then keeps. `on_closed` hears of each session that takes no more calls."""

    def __init__(self, journal: Appends, *, on_closed: Callable[[str], None] = lambda _: None) -> None:
        self._journal, self._on_closed = journal, on_closed
        self._records: dict[str, SessionRecord] = {}
        self._running: dict[str, list[Segment]] = {}
        self._untold = JournalBuffer(journal)
        self._last: dict[str, Piece] = {}
        self._cut: dict[str, dict[str, StoredCall]] = {}

    async def opened(self, session: Session) -> None:
        await self._journal.append(SessionOpened(session.session_id, session.uid, settings(session), session.opened_at))
        self._records[session.session_id] = SessionRecord(session.uid, session.session_id)

    async def started(self, call: SessionCall) -> None:
        self._running[call.call_id] = []
        start = CallStarted(call.session_id, call.call_id, call.digest, call.prompt_ids, recorded(call))
        self._untold.begin(start)

    def noted(self, call: SessionCall, piece: Piece) -> None:
        if piece.ids:
            self._untold.note(delta(call, piece))
            extend(self._running[call.call_id], piece)

    async def piece(self, call: SessionCall, piece: Piece) -> None:
        """The last piece is kept back for the call's end, before which nobody is shown it."""
        if piece.finish is not None:
            self._last[call.call_id] = piece
        elif piece.ids:
            written = self._untold.append(call.call_id, delta(call, piece))
            extend(self._running[call.call_id], piece)  # now: the journal has it even if this task is cancelled
            await written

    async def ended(self, call: SessionCall, finish: Finish, reply: dict[str, Any]) -> None:
        last, segments = self._last.pop(call.call_id, None), self._running.pop(call.call_id)
        events: list[Event] = []
        if last is not None and last.stop_reason is not None:
            reply = {**reply, "stop_reason": last.stop_reason}
        if last is not None and last.ids:
            events.append(delta(call, last))
            extend(segments, last)
        await self._untold.append(call.call_id, *events, CallEnded(call.call_id, finish, reply))
        self._cut.get(call.session_id, {}).pop(call.call_id, None)
        turn = Turn(call.call_id, call.prompt_ids, segments, finish, recorded(call), reply)
        self._records[call.session_id].add_turn(turn)

    async def rewarded(self, session: Session, name: str, value: float) -> None:
        await self._journal.append(RewardPosted(session.session_id, name, value))
        self._records[session.session_id].post_reward(value, name)

    async def closed(self, session: Session, reason: str) -> None:
        """Also ends as CANCELLED the calls that a restart cut and nobody asked for again."""
        if session.state is SessionState.EXPIRED:
            reason = Closed.EXPIRED
        cut = self._cut.pop(session.session_id, {})
        ends = [CallEnded(call_id, Finish.CANCELLED) for call_id in cut]
        await self._journal.append(*ends, SessionClosed(session.session_id, reason))
        record = self._records[session.session_id]
        for call_id, call in cut.items():
            self._running.pop(call_id, None)
            record.add_turn(call.turn())
        record.close(closed_as(reason))
        self._on_closed(session.session_id)

    def restore(self, left: Journalled) -> None:
        """Goes on with a session that was open when the journal was left."""
        self._records[left.session_id] = replay(left)
        cut = {call.call_id: call for call in left.calls if call.cut}
        if cut:
            self._cut[left.session_id] = cut
        for call_id, call in cut.items():
            self._running[call_id] = [
                Segment(one.ids[:], one.logprobs[:], one.version, one.replica) for one in call.segments
            ]

    def record(self, session_id: str) -> SessionRecord:
        """The session as it stands; raises KeyError for one that was taken, or is not ours."""
        return self._records[session_id]

    def take(self, session_id: str) -> SessionRecord:
        """The record of a closed session, which is not kept here any longer."""
        assert not self._records[session_id].is_open, f"session {session_id} is open; close it first"
        return self._records.pop(session_id)


def delta(call: SessionCall, piece: Piece) -> Delta:
    return Delta(call.call_id, piece.ids, piece.logprobs, piece.version, piece.replica)


def extend(segments: list[Segment], piece: Piece) -> None:
    """Put a piece at the end: a segment is maximal, so that it joins the last one of its version and replica."""
    if segments and (segments[-1].version, segments[-1].replica) == (piece.version, piece.replica):
        segments[-1].ids.extend(piece.ids)
        segments[-1].logprobs.extend(piece.logprobs)
    else:
        segments.append(Segment(tokens(piece.ids), logprobs(piece.logprobs), piece.version, piece.replica))


def recorded(call: SessionCall) -> dict[str, Any]:
    """The call's request, and with it what finds the call again after a restart."""
    own: dict[str, Any] = {"attempt": call.attempt, "place": call.place}
    own["max_tokens"] = call.sampling.get("max_tokens")
    if call.idempotency_key is not None:
        own["key"] = call.idempotency_key
    return {**call.request, OWN: own}


def settings(session: Session) -> dict[str, Any]:
    """What a restart needs of a session beside what was said in it."""
    return {
        "key": session.key_hash.hex(),
        "limits": asdict(session.limits),
        "sampling": asdict(session.sampling),
        "metadata": session.metadata,
    }
