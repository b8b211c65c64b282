"""Validates events and turns them into rows, before the disk is written.

Invariants: the validator knows every session that was not handed over and every call that can still receive tokens.
A rejected append leaves no row and no other effect. `n` numbers are never reused in one process. Rows hold only types
that SQLite can write, so no caller's value stops the writer. Only the journal's writer thread uses the validator.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan
from time import time
from typing import Any

from seamless_verl.errors import JournalOrderError
from seamless_verl.journal.events import (
    CallEnded,
    CallStarted,
    ChunkAppended,
    Event,
    GroupDecided,
    HandedOver,
    HandOverBegun,
    ImageAdded,
    OutsideEvent,
    RequestRefused,
    RewardPosted,
    SessionClosed,
    SessionOpened,
)
from seamless_verl.journal.prefix import PrefixChain, PrefixDigests
from seamless_verl.journal.schema import IMAGE_USES, IMAGES, LATER, TABLES, pack, to_json
from seamless_verl.journal.stored import Stage
from seamless_verl.trajectory.routes import packed

STAGES = tuple(Stage)  # a stage is stored as its index in this order

SMALLEST, LARGEST = -(1 << 63), (1 << 63) - 1  # of SQLite's integers
LONGEST = 256 << 20  # bytes or characters of one value: SQLite refuses a row of 10^9 bytes

Rows = dict[str, list[tuple[Any, ...]]]


@dataclass
class _SessionState:
    n: int
    stage: Stage
    calls: dict[str, _CallState] = field(default_factory=dict)
    images: set[str] = field(default_factory=set)  # that this process has stored


@dataclass(frozen=True)
class _CallState:
    n: int
    session: _SessionState
    chain: PrefixChain | None  # None for a call from before a restart: its beginning is not in the index


class Validator:
    """The part of the file's content that decides which events may follow, in memory."""

    def __init__(self, db: sqlite3.Connection, index: PrefixDigests | None = None) -> None:
        self._db, self._index = db, PrefixDigests() if index is None else index
        self._last_numbers = {
            table: _largest_number(db, table) for table in ("sessions", "calls", "replicas", "deltas")
        }
        self._sessions: dict[str, _SessionState] = {}
        self._calls: dict[str, _CallState] = {}
        self._handed_over: list[str] = []
        self._replicas = dict(db.execute("SELECT name, n FROM replicas"))
        self._undo: list[Callable[[], object]] = []
        self._rows = _empty_rows()
        self._handlers: dict[type, Callable[[Any], None]] = {
            SessionOpened: self._open_session,
            ImageAdded: self._add_image,
            CallStarted: self._start_call,
            ChunkAppended: self._append_chunk,
            CallEnded: self._end_call,
            RewardPosted: self._post_reward,
            RequestRefused: self._refuse_request,
            SessionClosed: self._close_session,
            HandOverBegun: self._begin_hand_over,
            HandedOver: self._end_hand_over,
            OutsideEvent: self._add_outside_event,
            GroupDecided: self._decide_group,
        }
        self._load()

    def apply(self, events: Sequence[Event]) -> None:
        """Accepts all of these events, or none.

        Raises:
            JournalOrderError: one cannot follow what is on record.
            TypeError, ValueError, OverflowError: one has a value that cannot be written.
        """
        self._undo.clear()
        try:
            for event in events:
                self._handlers[type(event)](event)
        except BaseException:
            self._revert()
            raise

    def take_rows(self) -> Rows:
        """The rows of the events accepted since the last call, by table."""
        rows, self._rows = self._rows, _empty_rows()
        for session_id in self._handed_over:
            del self._sessions[session_id]
        self._handed_over.clear()
        return rows

    def _revert(self) -> None:
        self._index.clear()  # it may name calls that will not be written
        while self._undo:
            self._undo.pop()()

    def _load(self) -> None:
        stages = dict(self._db.execute("SELECT session, MAX(stage) FROM stages GROUP BY session"))
        for n, session_id in self._db.execute("SELECT n, session_id FROM sessions"):
            stage = STAGES[stages.get(n, 0)]
            if stage is not Stage.HANDED:
                self._sessions[session_id] = _SessionState(n, stage)
        by_n = {session.n: session for session in self._sessions.values() if session.stage is Stage.OPEN}
        query = "SELECT n, session, call_id FROM calls WHERE n NOT IN (SELECT call FROM endings)"
        for n, session_n, call_id in self._db.execute(query):
            if session_n in by_n:
                self._calls[call_id] = by_n[session_n].calls[call_id] = _CallState(n, by_n[session_n], None)

    def _open_session(self, event: SessionOpened) -> None:
        query = "SELECT 1 FROM sessions WHERE session_id=?"
        if event.session_id in self._sessions or self._db.execute(query, (event.session_id,)).fetchone():
            raise JournalOrderError("opening", event.session_id, "a session of this id is on record")
        settings = to_json(event.settings)
        session = _SessionState(self._next_number("sessions"), Stage.OPEN)
        self._add_row("sessions", session.n, event.session_id, str(event.uid), settings, float(event.opened_at))
        self._sessions[event.session_id] = session
        self._undo.append(lambda: self._sessions.pop(event.session_id))

    def _add_image(self, event: ImageAdded) -> None:
        session = self._require_session("image", event.session_id, Stage.OPEN)
        if event.digest not in session.images:
            self._add_row(IMAGES, event.digest, event.data)
            self._add_row(IMAGE_USES, session.n, event.digest)
            session.images.add(event.digest)
            self._undo.append(lambda: session.images.discard(event.digest))

    def _start_call(self, event: CallStarted) -> None:
        session = self._require_session("start of a call", event.session_id, Stage.OPEN)
        if event.call_id in self._calls:
            raise JournalOrderError("start", event.call_id, "a call of this id is open")
        prompt, request = pack(event.prompt_ids), to_json(event.request)
        n = self._next_number("calls")
        chain = PrefixChain(self._index, session.n, n, b"ids")
        base, base_len = chain.begin(prompt)
        request_base, request_len = PrefixChain(self._index, session.n, n, b"request").begin(request)
        bases = (base, base_len, request_base, request_len)
        suffixes = (prompt[base_len:], request[request_len:])
        self._add_row("calls", n, session.n, event.call_id, event.digest, *bases, *suffixes)
        self._calls[event.call_id] = session.calls[event.call_id] = _CallState(n, session, chain)
        self._undo += (lambda: self._calls.pop(event.call_id), lambda: session.calls.pop(event.call_id))

    def _append_chunk(self, event: ChunkAppended) -> None:
        call = self._require_call("chunk", event.call_id)
        chunk = event.chunk
        ids, logprobs = pack(chunk.ids), pack(chunk.logprobs)
        if not ids:
            return
        replica = self._replicas.get(chunk.replica) or self._add_replica(chunk.replica)
        n, labels = self._next_number("deltas"), bytes(chunk.grammar) or None
        self._add_row("deltas", n, call.n, int(chunk.version), replica, ids, logprobs, labels)
        if chunk.routes is not None:
            self._add_row("routes", n, call.session.n, packed(chunk.routes), packed(chunk.prompt_routes) or None)
        if call.chain is not None:
            self._undo.append(call.chain.extend(ids))

    def _end_call(self, event: CallEnded) -> None:
        call = self._require_call("end", event.call_id)
        self._add_row("endings", call.n, event.finish.value, to_json(event.reply))
        self._remove_call(call, event.call_id)

    def _post_reward(self, event: RewardPosted) -> None:
        session = self._require_session("reward", event.session_id, Stage.OPEN, Stage.CLOSED)
        self._add_row("rewards", None, session.n, event.name, float(event.value))

    def _refuse_request(self, event: RequestRefused) -> None:
        session = self._require_session("refusal", event.session_id, Stage.OPEN, Stage.CLOSED)
        self._add_row("refused", None, session.n, event.path, int(event.status), event.message, float(event.at))

    def _close_session(self, event: SessionClosed) -> None:
        session = self._require_session("close", event.session_id, Stage.OPEN)
        self._set_stage(session, Stage.CLOSED, event.reason, time())
        for call_id, call in list(session.calls.items()):
            self._remove_call(call, call_id)
        self._index.drop(session.n)  # also if this is reverted: the index only saves bytes

    def _begin_hand_over(self, event: HandOverBegun) -> None:
        session = self._require_session("hand-over", event.session_id, Stage.CLOSED)
        self._set_stage(session, Stage.HANDING, _note(event.note), time())

    def _end_hand_over(self, event: HandedOver) -> None:
        session = self._require_session("end of the hand-over", event.session_id, Stage.HANDING)
        self._set_stage(session, Stage.HANDED, _note(event.note), float(event.handed_over_at))
        self._handed_over.append(event.session_id)
        self._undo.append(self._handed_over.pop)

    def _add_outside_event(self, event: OutsideEvent) -> None:
        self._add_row("outside_events", None, event.kind, event.subject, to_json(event.detail), float(event.at))

    def _decide_group(self, event: GroupDecided) -> None:
        decided = (event.uid, str(event.outcome), int(event.step), to_json(event.details), float(event.at or time()))
        self._add_row("group_outcomes", None, *decided)

    def _require_session(self, event: str, session_id: str, *stages: Stage) -> _SessionState:
        session = self._sessions.get(session_id)
        if session is None:
            raise JournalOrderError(event, session_id, "the session is unknown or was handed over")
        if session.stage not in stages:
            allowed = " or ".join(stages)
            reason = f"the session is {session.stage}; it must be {allowed}"
            raise JournalOrderError(event, session_id, reason, str(session.stage))
        return session

    def _require_call(self, event: str, call_id: str) -> _CallState:
        call = self._calls.get(call_id)
        if call is None:
            reason = "no such call is open: it never started, has ended, or its session was closed"
            raise JournalOrderError(event, call_id, reason)
        return call

    def _next_number(self, table: str) -> int:
        self._last_numbers[table] += 1
        return self._last_numbers[table]

    def _add_row(self, table: str, *row: Any) -> None:
        """Raises TypeError, ValueError or OverflowError for a value that SQLite would refuse, or change."""
        for value in row:
            _check_value(value)
        self._rows[table].append(row)
        self._undo.append(self._rows[table].pop)

    def _add_replica(self, name: str) -> int:
        n = self._next_number("replicas")
        self._add_row("replicas", n, name)
        self._replicas[name] = n
        self._undo.append(lambda: self._replicas.pop(name))
        return n

    def _set_stage(self, session: _SessionState, stage: Stage, note: str | None, at: float) -> None:
        before, session.stage = session.stage, stage
        self._undo.append(lambda: setattr(session, "stage", before))
        self._add_row("stages", session.n, STAGES.index(stage), note, at)

    def _remove_call(self, call: _CallState, call_id: str) -> None:
        del self._calls[call_id], call.session.calls[call_id]
        self._undo.append(lambda: self._calls.__setitem__(call_id, call))
        self._undo.append(lambda: call.session.calls.__setitem__(call_id, call))


def _check_value(value: object) -> None:
    if isinstance(value, (bytes, str)):
        if len(value) > LONGEST:
            raise ValueError(f"a value of {len(value)} bytes or characters is longer than a row can hold")
        if isinstance(value, str):
            value.encode()  # raises for what is not Unicode
    elif isinstance(value, int):
        if not SMALLEST <= value <= LARGEST:
            raise OverflowError(f"{value.bit_length()} bits are more than a row can hold")
    elif isinstance(value, float):
        if isnan(value):
            raise ValueError("NaN would be stored as nothing")
    elif value is not None:
        raise TypeError(f"a row cannot hold a {type(value).__name__}")


def _note(note: dict[str, Any]) -> str | None:
    return to_json(note).decode("utf-8", "replace") if note else None


def _empty_rows() -> Rows:
    return {table: [] for table in (*TABLES, *LATER)}


def _largest_number(db: sqlite3.Connection, table: str) -> int:
    return int(db.execute(f"SELECT COALESCE(MAX(n), 0) FROM {table}").fetchone()[0])
