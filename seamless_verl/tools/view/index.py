"""An index of a journal's sessions in memory, for listing, filtering and sorting many of them while a run writes.

Rows are only inserted, in the order of their numbers, so `refresh` reads what was added since the last one. Reading
every token of a large journal takes long, and happens once. Sessions that were deleted leave the index. A file that was
replaced, or lost its last rows, is read anew.

Invariant: after `refresh` the entries are those of one snapshot of the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from seamless_verl.journal import JournalReader, Stage
from seamless_verl.journal.reader import corrected_note, note_of, read_groups, read_undone
from seamless_verl.journal.schema import from_json
from seamless_verl.journal.stored import StoredGroup, is_validation, outcome_of
from seamless_verl.journal.validator import STAGES
from seamless_verl.tools.trajectories.recorded import dropped_of

BATCH = 8192  # rows read at a time
CLOSED, LAST = STAGES.index(Stage.CLOSED), STAGES.index(Stage.HANDED)
NUMBERED = {  # the tables of which only new rows are read, and their columns
    "sessions": "session_id, uid, opened_at, settings",
    "calls": "session",
    "deltas": "call, version, replica, LENGTH(ids) / 4, logprobs",
    "rewards": "session, name, value",
}


@dataclass(frozen=True)
class SessionEntry:
    """A session in brief, as in `SessionSummary`."""

    session_id: str
    uid: str
    opened_at: float
    validation: bool
    stage: Stage
    reason: str | None
    outcome: str
    dropped: str | None  # why nothing of it is trained, if so, and if it is known
    calls: int
    tokens: int  # generated
    mean_logprob: float | None  # theirs, in nats
    versions: tuple[int, int] | None  # the oldest and the newest of the weights that generated them
    replicas: tuple[str, ...]
    rewards: Mapping[str, float]


@dataclass
class _Session:
    """What was read of a session so far."""

    session_id: str
    uid: str
    opened_at: float
    settings: Mapping[str, Any]
    stage: int = 0
    reason: str | None = None
    hand_over: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    tokens: int = 0
    logprobs: float = 0.0
    versions: set[int] = field(default_factory=set)
    replicas: set[int] = field(default_factory=set)
    rewards: dict[str, float] = field(default_factory=dict)


class JournalIndex:
    """The index of the journal `path`; one thread at a time may use it. Errors are those of `JournalReader`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = JournalReader(path)
        self._clear()

    def _clear(self) -> None:
        self._file: int | None = None
        self._last = dict.fromkeys(NUMBERED, 0)
        self._sessions: dict[int, _Session] = {}
        self._call_sessions: dict[int, int] = {}
        self._replicas: dict[int, str] = {}
        self._groups: dict[str, StoredGroup] = {}
        self._undone: dict[str, dict[str, Any]] = {}  # by session id
        self._entries: dict[int, SessionEntry] = {}
        self._changed: set[int] = set()  # sessions whose entries are to be made anew

    def refresh(self) -> None:
        """Reads what was written since the last call."""
        file = self.path.stat().st_ino if self.path.exists() else None
        with self._reader.snapshot() as db:
            if file != self._file or self._was_cut(db):
                self._clear()
            self._file = file
            self._replicas = dict(db.execute("SELECT n, name FROM replicas").fetchall())
            self._read_rows(db)
            self._read_stages(db)
            self._read_ends(db)
            self._forget_deleted(db)
        for n in self._changed & self._sessions.keys():
            self._entries[n] = self._entry(self._sessions[n])
        self._changed.clear()

    def entries(self) -> Iterator[SessionEntry]:
        """All sessions, oldest first."""
        return (self._entries[n] for n in sorted(self._entries))

    def _was_cut(self, db: sqlite3.Connection) -> bool:
        """Whether the last rows read are gone: their numbers may be given again."""
        return any(
            n and not db.execute(f"SELECT 1 FROM {t} WHERE n>=?", (n,)).fetchone() for t, n in self._last.items()
        )

    def _new_rows(self, db: sqlite3.Connection, table: str) -> Iterator[list[tuple[Any, ...]]]:
        query = f"SELECT n, {NUMBERED[table]} FROM {table} WHERE n>? ORDER BY n"
        cursor = db.execute(query, (self._last[table],))
        while rows := cursor.fetchmany(BATCH):
            yield rows
            self._last[table] = rows[-1][0]

    def _change(self, n: int) -> _Session | None:
        """The session of this number, of which something was added; None if it is not on record."""
        self._changed.add(n)
        return self._sessions.get(n)

    def _read_rows(self, db: sqlite3.Connection) -> None:
        for rows in self._new_rows(db, "sessions"):
            for n, session_id, uid, opened_at, settings in rows:
                self._sessions[n] = _Session(session_id, uid, opened_at, from_json(settings))
                self._changed.add(n)
        for rows in self._new_rows(db, "calls"):
            for call, n in rows:
                self._call_sessions[call] = n
                if (session := self._change(n)) is not None:
                    session.calls += 1
        for rows in self._new_rows(db, "deltas"):
            sums = sums_of([row[-1] for row in rows])
            for (_, call, version, replica, tokens, _), logprobs in zip(rows, sums, strict=True):
                if (session := self._change(self._call_sessions.get(call, 0))) is not None:
                    session.tokens += tokens
                    session.logprobs += logprobs
                    session.versions.add(version)
                    session.replicas.add(replica)
        for rows in self._new_rows(db, "rewards"):
            for _, n, name, value in rows:
                if (session := self._change(n)) is not None:
                    session.rewards[name] = value

    def _read_stages(self, db: sqlite3.Connection) -> None:
        """Of the sessions that can still reach a later stage; stages have no numbers of their own."""
        first = min((n for n, one in self._sessions.items() if one.stage < LAST), default=None)
        if first is None:
            return
        for n, stage, note in db.execute("SELECT session, stage, note FROM stages WHERE session>=?", (first,)):
            if (session := self._change(n)) is None:
                continue
            session.stage = max(session.stage, stage)
            if stage == CLOSED:
                session.reason = note
            elif stage == LAST:
                session.hand_over = note_of(note)

    def _read_ends(self, db: sqlite3.Connection) -> None:
        """What became of groups, and which hand-overs were undone."""
        groups, undone = read_groups(db), read_undone(db)
        uids = {uid for uid in self._groups.keys() | groups.keys() if self._groups.get(uid) != groups.get(uid)}
        ids = {name for name, note in undone.items() if self._undone.get(name) != note}
        self._groups, self._undone = groups, undone
        if uids or ids:
            self._changed.update(n for n, one in self._sessions.items() if one.uid in uids or one.session_id in ids)

    def _forget_deleted(self, db: sqlite3.Connection) -> None:
        if db.execute("SELECT COUNT(*) FROM sessions").fetchone()[0] == len(self._sessions):
            return
        kept = {n for (n,) in db.execute("SELECT n FROM sessions")}
        self._sessions = {n: one for n, one in self._sessions.items() if n in kept}
        self._entries = {n: one for n, one in self._entries.items() if n in kept}
        self._call_sessions = {call: n for call, n in self._call_sessions.items() if n in kept}

    def _entry(self, one: _Session) -> SessionEntry:
        group, stage, validation = self._groups.get(one.uid), STAGES[one.stage], is_validation(one.settings)
        end_note = corrected_note(one.hand_over, self._undone.get(one.session_id))
        dropped = dropped_of(stage, one.reason, one.settings, end_note, group)
        return SessionEntry(
            one.session_id,
            one.uid,
            one.opened_at,
            validation,
            stage,
            one.reason,
            outcome_of(stage, validation, end_note, group),
            None if dropped is None else str(dropped),
            one.calls,
            one.tokens,
            one.logprobs / one.tokens if one.tokens else None,
            (min(one.versions), max(one.versions)) if one.versions else None,
            tuple(sorted(self._replicas[n] for n in one.replicas)),
            one.rewards | end_note.get("rewards", {}),
        )


def sums_of(blobs: list[bytes]) -> list[float]:
    """The sum of each blob's float32 values, little endian."""
    sizes = np.fromiter(map(len, blobs), np.int64, len(blobs)) // 4
    values = np.frombuffer(b"".join(blobs), "<f4").astype(np.float64)
    ends = np.concatenate([[0.0], np.cumsum(values)])
    stops = np.cumsum(sizes)
    sums: list[float] = (ends[stops] - ends[stops - sizes]).tolist()
    return sums
