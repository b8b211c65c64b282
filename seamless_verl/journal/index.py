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

from seamless_verl.journal.events import GroupOutcome
from seamless_verl.journal.reader import JournalReader, corrected_note, note_of, read_groups, read_undone
from seamless_verl.journal.schema import from_json
from seamless_verl.journal.stored import Stage, StoredGroup, is_validation, outcome_of
from seamless_verl.journal.validator import STAGES
from seamless_verl.trajectory.account import DropReason

BATCH = 8192  # rows read at a time
CLOSED, LAST = STAGES.index(Stage.CLOSED), STAGES.index(Stage.HANDED)
NUMBERED = ("sessions", "calls", "deltas", "rewards")  # the tables of which only new rows are read
CHUNKS = "SELECT n, call, version, replica, LENGTH(ids) / 4, logprobs FROM deltas WHERE n>? ORDER BY n"


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
    validation: bool
    stage: int = 0
    reason: str | None = None
    hand_over: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    tokens: int = 0
    logprobs: float = 0.0
    oldest: int | None = None
    newest: int = 0
    replicas: set[int] = field(default_factory=set)
    rewards: dict[str, float] = field(default_factory=dict)

    def add(self, tokens: int, logprobs: float, version: int, replica: int) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.oldest = version if self.oldest is None else min(self.oldest, version)
        self.newest = max(self.newest, version)
        self.replicas.add(replica)


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
            self._read_sessions(db)
            self._read_calls(db)
            self._read_chunks(db)
            self._read_rewards(db)
            self._read_stages(db)
            self._read_groups(db)
            self._read_undone(db)
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

    def _read_sessions(self, db: sqlite3.Connection) -> None:
        query = "SELECT n, session_id, uid, opened_at, settings FROM sessions WHERE n>? ORDER BY n"
        for n, session_id, uid, opened_at, settings in db.execute(query, (self._last["sessions"],)):
            self._sessions[n] = _Session(session_id, uid, opened_at, is_validation(from_json(settings)))
            self._last["sessions"] = n
            self._changed.add(n)

    def _read_calls(self, db: sqlite3.Connection) -> None:
        for n, session in db.execute("SELECT n, session FROM calls WHERE n>? ORDER BY n", (self._last["calls"],)):
            self._call_sessions[n] = session
            self._last["calls"] = n
            if session in self._sessions:
                self._sessions[session].calls += 1
                self._changed.add(session)

    def _read_chunks(self, db: sqlite3.Connection) -> None:
        cursor = db.execute(CHUNKS, (self._last["deltas"],))
        while rows := cursor.fetchmany(BATCH):
            sums = sums_of([row[5] for row in rows])
            for (_, call, version, replica, tokens, _), logprobs in zip(rows, sums, strict=True):
                n = self._call_sessions.get(call, 0)
                if n in self._sessions:
                    self._sessions[n].add(tokens, logprobs, version, replica)
                    self._changed.add(n)
            self._last["deltas"] = rows[-1][0]

    def _read_rewards(self, db: sqlite3.Connection) -> None:
        query = "SELECT n, session, name, value FROM rewards WHERE n>? ORDER BY n"
        for n, session, name, value in db.execute(query, (self._last["rewards"],)):
            self._last["rewards"] = n
            if session in self._sessions:
                self._sessions[session].rewards[name] = value
                self._changed.add(session)

    def _read_stages(self, db: sqlite3.Connection) -> None:
        """Of the sessions that can still reach a later stage; stages have no numbers of their own."""
        first = min((n for n, one in self._sessions.items() if one.stage < LAST), default=None)
        if first is None:
            return
        for n, stage, note in db.execute("SELECT session, stage, note FROM stages WHERE session>=?", (first,)):
            if (session := self._sessions.get(n)) is None:
                continue
            self._changed.add(n)
            session.stage = max(session.stage, stage)
            if stage == CLOSED:
                session.reason = note
            elif stage == LAST:
                session.hand_over = note_of(note)

    def _read_groups(self, db: sqlite3.Connection) -> None:
        before, self._groups = self._groups, read_groups(db)
        if decided := {uid for uid in before.keys() | self._groups.keys() if before.get(uid) != self._groups.get(uid)}:
            self._changed.update(n for n, one in self._sessions.items() if one.uid in decided)

    def _read_undone(self, db: sqlite3.Connection) -> None:
        before, self._undone = self._undone, read_undone(db)
        if undone := {name for name, note in self._undone.items() if before.get(name) != note}:
            self._changed.update(n for n, one in self._sessions.items() if one.session_id in undone)

    def _forget_deleted(self, db: sqlite3.Connection) -> None:
        if db.execute("SELECT COUNT(*) FROM sessions").fetchone()[0] == len(self._sessions):
            return
        kept = {n for (n,) in db.execute("SELECT n FROM sessions")}
        self._sessions = {n: one for n, one in self._sessions.items() if n in kept}
        self._entries = {n: one for n, one in self._entries.items() if n in kept}
        self._call_sessions = {call: n for call, n in self._call_sessions.items() if n in kept}

    def _entry(self, one: _Session) -> SessionEntry:
        group, stage = self._groups.get(one.uid), STAGES[one.stage]
        hand_over = corrected_note(one.hand_over, self._undone.get(one.session_id))
        known = (one.session_id, one.uid, one.opened_at, one.validation, stage, one.reason)
        became = outcome_of(stage, one.validation, hand_over, group), dropped_of(one, hand_over, group)
        logprob = one.logprobs / one.tokens if one.tokens else None
        versions = None if one.oldest is None else (one.oldest, one.newest)
        replicas, rewards = sorted(self._replicas[n] for n in one.replicas), one.rewards | hand_over.get("rewards", {})
        return SessionEntry(*known, *became, one.calls, one.tokens, logprob, versions, tuple(replicas), rewards)


def dropped_of(one: _Session, hand_over: Mapping[str, Any], group: StoredGroup | None) -> str | None:
    """Why nothing of the session is trained, as in `recorded`."""
    if one.stage > 0 and hand_over.get("kept") is False:
        return str(hand_over.get("dropped", DropReason.SESSION))
    if one.validation:
        return str(DropReason.VALIDATION)
    if group is None or group.outcome is GroupOutcome.TRAINED:
        return None
    return str(DropReason.DEFERRED if group.outcome is GroupOutcome.DEFERRED else DropReason.GROUP)


def sums_of(blobs: list[bytes]) -> list[float]:
    """The sum of each blob's float32 values, little endian."""
    sizes = np.fromiter(map(len, blobs), np.int64, len(blobs)) // 4
    values = np.frombuffer(b"".join(blobs), "<f4").astype(np.float64)
    ends = np.concatenate([[0.0], np.cumsum(values)])
    stops = np.cumsum(sizes)
    sums: list[float] = (ends[stops] - ends[stops - sizes]).tolist()
    return sums
