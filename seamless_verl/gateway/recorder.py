"""Records sessions in the journal: what it has returned from survives the gateway's death.

Invariants:
- A call's events reach the journal in their order. What nobody awaits is appended FLUSH_S after the call's first
  buffered token, at most one append of a call at a time, so that a slow journal is not flooded.
- Who awaits an append gets the error of any earlier append of its call.
- A call is in the journal from its first tokens on, or from its end: of a call that a restart forgot, the agent has
  seen nothing. A call's last tokens and its end are one append.
- A session's record holds the turns whose end is in the journal, and their tokens are the journal's. When a session is
  closed, every call of it has an end on record.
- A call whose end the journal refuses, as for a value that cannot be written, is on record as FAILED with all its
  tokens: none is lost from the account.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from seamless_verl.errors import JournalError, JournalOrderError
from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.gateway.calls import REPLY, SessionCall
from seamless_verl.gateway.session import Session, SessionState
from seamless_verl.journal import (
    CallEnded,
    CallStarted,
    ChunkAppended,
    Event,
    ImageAdded,
    RequestRefused,
    RewardPosted,
    SessionClosed,
    SessionOpened,
    SqliteJournal,
    StoredCall,
    StoredSession,
)
from seamless_verl.journal.stored import parse_close_reason, rebuild_record
from seamless_verl.trajectory.images import GATEWAY_KEY
from seamless_verl.trajectory.records import Finish, Segment, TokenChunk, Turn, append_chunk
from seamless_verl.trajectory.routes import Routes
from seamless_verl.trajectory.session import Closed, SessionRecord
from seamless_verl.trajectory.tree import PlacedTurn

logger = logging.getLogger(__name__)
FLUSH_S = 0.05  # a crash costs at most so many seconds of an engine's work
MAX_REFUSED = 256  # recorded of one session: an agent may repeat a bad request for ever
MAX_MESSAGE = 1000  # characters of a refusal's message that are recorded

BEGINNINGS = ("", "chatcmpl-", "msg_", "cmpl-", "generate-tokens-")  # of the ids of replies: what the APIs add to names


class JournalBuffer:
    """Buffers journal events of running calls, so that those of many calls share one commit."""

    def __init__(self, journal: SqliteJournal) -> None:
        self._journal = journal
        self._events: dict[str, list[Event]] = {}
        self._appends: dict[str, asyncio.Future[None]] = {}
        self._flush_timer: asyncio.TimerHandle | None = None
        self._failure: JournalError | None = None

    def start(self, started: CallStarted, *before: Event) -> None:
        """Buffers a call's start, and what comes before it, until the call's first token, or its end."""
        self._events[started.call_id] = [*before, started]

    def add(self, event: ChunkAppended) -> None:
        """Buffers tokens, which are appended soon.

        Raises JournalError where the journal accepts nothing any more, JournalOrderError if it refused the last append.
        """
        if self._failure is not None:
            raise JournalError(*self._failure.args)  # one exception for all would collect their tracebacks
        if (pending := self._appends.get(event.call_id)) is not None and pending.done():
            pending.result()
        self._events.setdefault(event.call_id, []).append(event)
        self._schedule_flush()

    def append(self, call_id: str, *events: Event) -> Awaitable[Any]:
        """Appends at once, after what is buffered; the result is that of all appends of the call."""
        append = self._journal.append(*self._events.pop(call_id, ()), *events)
        pending = self._appends.pop(call_id, None)
        return asyncio.gather(pending, append) if pending is not None else append

    def take(self, call_id: str) -> list[Event]:
        """What is buffered of a call, for its caller to append."""
        return self._events.pop(call_id, [])

    def _schedule_flush(self) -> None:
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        waiting = [call_id for call_id, events in self._events.items() if isinstance(events[-1], ChunkAppended)]
        try:
            for call_id in waiting:
                if self._may_append(call_id):
                    self._appends[call_id] = self._journal.append(*self._events.pop(call_id))
        except JournalError as error:  # the journal has ended for good; each call gets this with its next chunk
            self._failure = error
            return
        if any(call_id in self._events for call_id in waiting):
            self._schedule_flush()

    def _may_append(self, call_id: str) -> bool:
        """Whether the call's last append succeeded; the error of one that failed is for the next chunk, or the end."""
        pending = self._appends.get(call_id)
        return pending is None or (pending.done() and not pending.cancelled() and pending.exception() is None)


class JournalRecorder:
    """Stores what happens in sessions: in the journal first, then in its records.

    When an awaited method has returned, its content survives a crash, and only then may the agent see any of it.
    `on_closed` is called with the id of each session that accepts no more calls. With `routes` engines return them.
    """

    def __init__(
        self, journal: SqliteJournal, *, on_closed: Callable[[str], None] = lambda _: None, routes: bool = False
    ) -> None:
        self._journal, self._on_closed, self._routes = journal, on_closed, routes
        self._buffer = JournalBuffer(journal)
        self._records: dict[str, SessionRecord] = {}
        self._segments: dict[str, list[Segment]] = {}  # of running calls
        self._prompt_routes: dict[str, Routes] = {}  # likewise
        self._last_chunks: dict[str, TokenChunk] = {}
        self._interrupted_calls: dict[str, dict[str, StoredCall]] = {}  # by a restart; until continued, or closed

    async def open_session(self, session: Session) -> None:
        opened = SessionOpened(session.session_id, session.uid, session.stored_settings(), session.opened_at)
        await self._journal.append(opened)
        record = SessionRecord(session.uid, session.session_id, validation=session.validation)
        self._records[session.session_id] = record

    async def start_call(self, call: SessionCall) -> None:
        """The start of a call that a restart interrupted is on record."""
        if call.call_id not in self._interrupted_calls.get(call.session_id, {}):
            self._segments[call.call_id] = []
            self._records[call.session_id].images.update(call.files)
            self._buffer.start(_started(call), *_images(call))

    def routes_needed_from(self, call: SessionCall) -> int | None:
        """The first of the prompt's tokens whose route is not on record, as a call has it; None if none is needed."""
        if not self._routes or call.validation:
            return None
        return self._records[call.session_id].tree.routes_needed_from(call.prompt_ids, call.images)

    def buffer_chunk(self, call: SessionCall, chunk: TokenChunk) -> None:
        """For a chunk that is not the last, and that nobody sees before a later one; it is stored with that one."""
        if chunk.ids:
            self._keep(call, chunk)  # first: it was generated even if it is refused
            self._buffer.add(ChunkAppended(call.call_id, chunk))

    async def record_chunk(self, call: SessionCall, chunk: TokenChunk) -> None:
        """Holds the last chunk back for the call's end, before which nobody sees it."""
        if chunk.finish_reason is not None:
            self._last_chunks[call.call_id] = chunk
        elif chunk.ids:
            append = self._buffer.append(call.call_id, ChunkAppended(call.call_id, chunk))
            self._keep(call, chunk)  # now: it is journalled even if this task is cancelled
            await append

    def _keep(self, call: SessionCall, chunk: TokenChunk) -> None:
        append_chunk(self._segments[call.call_id], chunk)
        if chunk.prompt_routes is not None:
            self._prompt_routes.setdefault(call.call_id, chunk.prompt_routes)

    async def end_call(self, call: SessionCall, finish: Finish, reply: dict[str, Any]) -> None:
        """The call has all its tokens; `reply` is what the agent is going to read.

        A call that has ended stays as it is: an error that its end had ends it a second time.
        """
        last, segments = self._last_chunks.pop(call.call_id, None), self._segments.get(call.call_id)
        if segments is None:
            return
        events = self._buffer.take(call.call_id)
        if last is not None and last.stop_reason is not None:
            reply = {**reply, "stop_reason": last.stop_reason}
        if last is not None and last.ids:
            events.append(ChunkAppended(call.call_id, last))
            self._keep(call, last)
        del self._segments[call.call_id]
        try:
            await self._buffer.append(call.call_id, *events, CallEnded(call.call_id, finish, reply))
        except JournalError:  # it accepts nothing any more
            raise
        except Exception:  # it refused this append, and goes on
            self._add_turn(call, segments, Finish.FAILED, await self._end_refused(call, segments, events), {})
            raise
        self._add_turn(call, segments, finish, call.stored_request(), reply)

    def _add_turn(
        self, call: SessionCall, segments: list[Segment], finish: Finish, request: dict[str, Any], reply: dict[str, Any]
    ) -> None:
        self._interrupted_calls.get(call.session_id, {}).pop(call.call_id, None)
        routes = self._prompt_routes.pop(call.call_id, None)
        turn = Turn(call.call_id, call.prompt_ids, segments, finish, request, reply, routes)
        self._records[call.session_id].add_turn(turn)

    async def _end_refused(self, call: SessionCall, segments: list[Segment], events: list[Event]) -> dict[str, Any]:
        """Ends a call as FAILED, without its end and `events`, which were refused; returns its request on record."""
        end = CallEnded(call.call_id, Finish.FAILED, {})
        try:
            await self._journal.append(*(one for one in events if isinstance(one, ChunkAppended)), end)
            return call.stored_request()
        except JournalOrderError:  # its start was refused, too
            bare = replace(call, request={})
            chunks = [ChunkAppended(call.call_id, segment.chunk()) for segment in segments]
            await self._journal.append(*_images(bare), _started(bare), *chunks, end)
            return bare.stored_request()

    async def post_reward(self, session: Session, name: str, value: float) -> None:
        """Raises ApiError when the session accepts no more rewards."""
        record = self._records.get(session.session_id)
        if record is None:
            raise _too_late(session)
        try:
            await self._journal.append(RewardPosted(session.session_id, name, value))
        except JournalOrderError as error:
            raise _too_late(session) from error
        record.post_reward(value, name)

    def find_turn(self, session: Session, reply_id: str) -> str | None:
        """The id of the turn that the agent got as the reply of this id, the first of n choices; None without one."""
        if (record := self._records.get(session.session_id)) is None:
            return None
        names = {reply_id.removeprefix(beginning) for beginning in BEGINNINGS}
        found = [turn for turn in record.turns if turn.finish is not Finish.FAILED and _own(turn).get(REPLY) in names]
        return min(found, key=lambda turn: int(_own(turn).get("place", 0))).turn_id if found else None

    def note_refusal(self, session: Session, path: str, status: int, message: str) -> None:
        """Stores that a request got an error; nobody waits for it."""
        if session.refused > MAX_REFUSED:
            return
        event = RequestRefused(session.session_id, _unicode(path), status, _unicode(message), time.time())
        with suppress(JournalError):  # it accepts nothing any more; what it refused has said so
            self._journal.append(event).add_done_callback(_log_lost_refusal)

    async def close_session(self, session: Session, reason: str) -> None:
        """Also ends as CANCELLED the calls that a restart interrupted and no retry continued.

        Where an agent failed after its last call failed, that is the reason.
        """
        turns = self._records[session.session_id].turns
        if session.state is SessionState.EXPIRED:
            reason = Closed.EXPIRED
        elif reason == Closed.FAILED:
            unserved = bool(turns) and turns[-1].finish is Finish.FAILED  # also in the middle of a stream
            reason = Closed.ENGINE_FAILED if unserved else session.failed_as or reason
        interrupted_calls = self._interrupted_calls.pop(session.session_id, {})
        ends = [CallEnded(call_id, Finish.CANCELLED) for call_id in interrupted_calls]
        await self._journal.append(*ends, SessionClosed(session.session_id, reason))
        record = self._records[session.session_id]
        for call_id, call in interrupted_calls.items():
            self._segments.pop(call_id, None)
            self._prompt_routes.pop(call_id, None)
            record.add_turn(call.turn())
        record.close(parse_close_reason(reason))
        self._on_closed(session.session_id)

    def restore_session(self, stored: StoredSession) -> None:
        """Continues a session that was open when the journal's last writer ended."""
        self._records[stored.session_id] = rebuild_record(stored)
        interrupted_calls = {call.call_id: call for call in stored.calls if call.interrupted}
        if interrupted_calls:
            self._interrupted_calls[stored.session_id] = interrupted_calls
        for call_id, call in interrupted_calls.items():
            segments = self._segments[call_id] = list[Segment]()
            for segment in call.segments:
                append_chunk(segments, segment)
            if call.prompt_routes is not None:
                self._prompt_routes[call_id] = call.prompt_routes

    def record(self, session_id: str) -> SessionRecord:
        """The session's record so far; raises KeyError for one that was taken, or is unknown."""
        return self._records[session_id]

    def take(self, session_id: str) -> SessionRecord:
        """The record of a closed session, which is dropped here."""
        assert not self._records[session_id].is_open, f"session {session_id} is open; close it first"
        return self._records.pop(session_id)


def _started(call: SessionCall) -> CallStarted:
    return CallStarted(call.session_id, call.call_id, call.digest, call.prompt_ids, call.stored_request())


def _images(call: SessionCall) -> list[Event]:
    """With each call: which of a session's calls is in the journal first, nobody knows."""
    return [ImageAdded(call.session_id, digest, data) for digest, data in call.files.items()]


def _own(turn: PlacedTurn) -> dict[str, Any]:
    own: dict[str, Any] = turn.request.get(GATEWAY_KEY, {})
    return own


def _too_late(session: Session) -> ApiError:
    return ApiError(ErrorCode.CLOSED, f"Session {session.session_id} has ended, and was handed over with its rewards")


def _unicode(text: str) -> str:
    """The text, bounded, without what is no character."""
    return text[:MAX_MESSAGE].encode("utf-8", "replace").decode()


def _log_lost_refusal(append: asyncio.Future[None]) -> None:
    """A refusal may come after its session was handed over; nobody waits for its append."""
    if not append.cancelled() and (error := append.exception()) is not None:
        logger.info("a refused request is not in the journal: %s", error)
