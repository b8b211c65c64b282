"""What may follow what: events become rows, or are refused, before the disk is touched.

Invariants: the book knows every session that was not handed over and every call that can still be given
tokens; an append that is refused leaves no row and no trace; `n` numbers are never given twice in one
process; rows hold only types that SQLite can write, so that no caller's value stops the writer. Owned by
the journal's writer thread alone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any

from seamless_verl.errors import JournalOrderError
from seamless_verl.journal import events as ev
from seamless_verl.journal.prefix import PrefixChain, PrefixDigests
from seamless_verl.journal.protocol import Stage
from seamless_verl.journal.schema import TABLES, pack, to_json

STAGES = tuple(Stage)  # a stage is stored as its place in this order

Rows = dict[str, list[tuple[Any, ...]]]


@dataclass
class _Session:
    n: int
    stage: Stage
    calls: dict[str, _Call] = field(default_factory=dict)


@dataclass(frozen=True)
class _Call:
    n: int
    session: _Session
    chain: PrefixChain | None  # None for one from before a restart: its beginning is not in the index


class Validator:
    """The state of the file, in memory, as far as it decides what may come next."""

    def __init__(self, db: sqlite3.Connection, index: PrefixDigests | None = None) -> None:
        self._db, self._index = db, PrefixDigests() if index is None else index
        self._last = {table: _count(db, table) for table in ("sessions", "calls", "replicas")}
        self._sessions: dict[str, _Session] = {}
        self._calls: dict[str, _Call] = {}
        self._handed: list[str] = []
        self._replicas = dict(db.execute("SELECT name, n FROM replicas"))
        self._undo: list[Callable[[], object]] = []
        self._rows = _no_rows()
        self._enter: dict[type, Callable[[Any], None]] = {
            ev.SessionOpened: self._opened,
            ev.CallStarted: self._started,
            ev.Delta: self._delta,
            ev.CallEnded: self._ended,
            ev.RewardPosted: self._reward,
            ev.SessionClosed: self._closed,
            ev.HandOverBegun: self._begun,
            ev.HandedOver: self._over,
        }
        self._load()

    def enter(self, events: Sequence[ev.Event]) -> None:
        """Take all of these events, or none.

        Raises:
            JournalOrderError: one cannot follow what is on record.
            TypeError, ValueError: one holds what cannot be written.
        """
        self._undo.clear()
        try:
            for event in events:
                self._enter[type(event)](event)
        except BaseException:
            self._revert()
            raise

    def take(self) -> Rows:
        """The rows entered since the last take, by table."""
        rows, self._rows = self._rows, _no_rows()
        for session_id in self._handed:
            del self._sessions[session_id]
        self._handed.clear()
        return rows

    def _revert(self) -> None:
        self._index.clear()  # it may name calls that are now never written
        while self._undo:
            self._undo.pop()()

    def _put(self, table: str, *row: Any) -> None:
        self._rows[table].append(row)
        self._undo.append(self._rows[table].pop)

    def _next(self, table: str) -> int:
        self._last[table] += 1
        return self._last[table]

    def _load(self) -> None:
        stages = dict(self._db.execute("SELECT session, MAX(stage) FROM stages GROUP BY session"))
        for n, session_id in self._db.execute("SELECT n, session_id FROM sessions"):
            stage = STAGES[stages.get(n, 0)]
            if stage is not Stage.HANDED:
                self._sessions[session_id] = _Session(n, stage)
        by_n = {session.n: session for session in self._sessions.values() if session.stage is Stage.OPEN}
        query = "SELECT n, session, call_id FROM calls WHERE n NOT IN (SELECT call FROM endings)"
        for n, owner, call_id in self._db.execute(query):
            if owner in by_n:
                self._calls[call_id] = by_n[owner].calls[call_id] = _Call(n, by_n[owner], None)

    def _at(self, event: str, session_id: str, *stages: Stage) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise JournalOrderError(event, session_id, "the session is unknown or was handed over")
        if session.stage not in stages:
            allowed = " or ".join(stages)
            raise JournalOrderError(event, session_id, f"the session is {session.stage}; it must be {allowed}")
        return session

    def _open_call(self, event: str, call_id: str) -> _Call:
        call = self._calls.get(call_id)
        if call is None:
            raise JournalOrderError(event, call_id, "no such call is open: it never started, has ended, or was cut")
        return call

    def _opened(self, event: ev.SessionOpened) -> None:
        known = "SELECT 1 FROM sessions WHERE session_id=?"
        if event.session_id in self._sessions or self._db.execute(known, (event.session_id,)).fetchone():
            raise JournalOrderError("opening", event.session_id, "a session of this id is on record")
        settings = to_json(event.settings)
        session = _Session(self._next("sessions"), Stage.OPEN)
        self._put("sessions", session.n, event.session_id, str(event.uid), settings, float(event.opened_at))
        self._sessions[event.session_id] = session
        self._undo.append(lambda: self._sessions.pop(event.session_id))

    def _started(self, event: ev.CallStarted) -> None:
        session = self._at("start of a call", event.session_id, Stage.OPEN)
        if event.call_id in self._calls:
            raise JournalOrderError("start", event.call_id, "a call of this id is open")
        prompt, request = pack(event.prompt_ids), to_json(event.request)
        n, seed = self._next("calls"), session.n.to_bytes(8, "little")
        chain = PrefixChain(self._index, n, seed + b"ids")
        base, shared = chain.start(prompt)
        request_base, same = PrefixChain(self._index, n, seed + b"request").start(request)
        bases = (base, shared, request_base, same)
        self._put("calls", n, session.n, event.call_id, event.digest, *bases, prompt[shared:], request[same:])
        self._calls[event.call_id] = session.calls[event.call_id] = _Call(n, session, chain)
        self._undo += (lambda: self._calls.pop(event.call_id), lambda: session.calls.pop(event.call_id))

    def _delta(self, event: ev.Delta) -> None:
        call = self._open_call("delta", event.call_id)
        ids, logprobs = pack(event.ids), pack(event.logprobs)
        if not ids:
            return
        replica = self._replicas.get(event.replica) or self._replica(event.replica)
        self._put("deltas", call.n, int(event.version), replica, ids, logprobs)
        if call.chain is not None:
            call.chain.feed(ids)

    def _replica(self, name: str) -> int:
        n = self._replicas[name] = self._next("replicas")
        self._put("replicas", n, name)
        self._undo.append(lambda: self._replicas.pop(name))
        return n

    def _ended(self, event: ev.CallEnded) -> None:
        call = self._open_call("end", event.call_id)
        self._put("endings", call.n, event.finish.value, to_json(event.reply))
        self._forget(call, event.call_id)

    def _forget(self, call: _Call, call_id: str) -> None:
        del self._calls[call_id], call.session.calls[call_id]
        self._undo.append(lambda: self._calls.__setitem__(call_id, call))
        self._undo.append(lambda: call.session.calls.__setitem__(call_id, call))

    def _reward(self, event: ev.RewardPosted) -> None:
        session = self._at("reward", event.session_id, Stage.OPEN, Stage.CLOSED)
        self._put("rewards", None, session.n, event.name, float(event.value))

    def _move(self, session: _Session, stage: Stage, note: str | None, at: float) -> None:
        before, session.stage = session.stage, stage
        self._undo.append(lambda: setattr(session, "stage", before))
        self._put("stages", session.n, STAGES.index(stage), note, at)

    def _closed(self, event: ev.SessionClosed) -> None:
        session = self._at("close", event.session_id, Stage.OPEN)
        self._move(session, Stage.CLOSED, event.reason, time())
        for call_id, call in list(session.calls.items()):
            self._forget(call, call_id)

    def _begun(self, event: ev.HandOverBegun) -> None:
        self._move(self._at("hand-over", event.session_id, Stage.CLOSED), Stage.HANDING, None, time())

    def _over(self, event: ev.HandedOver) -> None:
        self._move(self._at("handed over", event.session_id, Stage.HANDING), Stage.HANDED, None, float(event.handed_at))
        self._handed.append(event.session_id)
        self._undo.append(self._handed.pop)


def _no_rows() -> Rows:
    return {table: [] for table in TABLES}


def _count(db: sqlite3.Connection, table: str) -> int:
    return int(db.execute(f"SELECT COALESCE(MAX(n), 0) FROM {table}").fetchone()[0])
