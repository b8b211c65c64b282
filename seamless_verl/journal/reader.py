"""Reads a journal, also while another process writes it.

Invariant: each method reads one snapshot over a connection of its own and closes it before it returns; it delays no
writer. All methods block: a gateway reads before it serves, or in a thread.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError, JournalError, JournalOrderError, shorten
from seamless_verl.journal.events import BEGUN, LEASED, UNDONE, GroupOutcome, OutsideEvent, RequestRefused
from seamless_verl.journal.schema import (
    IMAGE_USES,
    ROUTES,
    TABLES,
    WAY_OUT,
    check_version,
    from_json,
    has_table,
    journal_error,
    pack,
    read_only,
    unpack,
)
from seamless_verl.journal.stored import (
    SessionSummary,
    Stage,
    StoredCall,
    StoredGroup,
    StoredSession,
    rebuild_record,
)
from seamless_verl.journal.validator import STAGES
from seamless_verl.runtime.locks import is_locked
from seamless_verl.trajectory.records import LOGPROB, TOKEN, Finish, Segment, append_chunk
from seamless_verl.trajectory.routes import Routes, unpacked
from seamless_verl.trajectory.session import SessionRecord

STAGE = "COALESCE((SELECT MAX(stage) FROM stages WHERE session=sessions.n), 0)"
REASON = f"(SELECT note FROM stages WHERE session=sessions.n AND stage={STAGES.index(Stage.CLOSED)})"
NOTE = "(SELECT note FROM stages WHERE session=sessions.n AND stage={stage})"
CALLS = (
    "SELECT n, call_id, digest, base, base_len, request_base, request_len, suffix, request, finish, reply"
    " FROM calls LEFT JOIN endings ON call=n WHERE session=? ORDER BY n"
)
CHUNKS = (
    "SELECT call, version, name, ids, logprobs, grammar, {routes}"
    " FROM deltas JOIN replicas ON replicas.n=replica {joined}"
    " WHERE call IN (SELECT n FROM calls WHERE session=?) ORDER BY deltas.n"
)
WITH_ROUTES = CHUNKS.format(routes="of_tokens, of_prompt", joined="LEFT JOIN routes ON delta=deltas.n")
WITHOUT_ROUTES = CHUNKS.format(routes="NULL, NULL", joined="")
SUMMARIES = (
    f"SELECT session_id, uid, settings, {STAGE}, {REASON}, opened_at,"
    " (SELECT COUNT(*) FROM calls WHERE session=sessions.n), COALESCE(tokens, 0), oldest, newest,"
    f" {NOTE.format(stage=STAGES.index(Stage.HANDING))}, {NOTE.format(stage=STAGES.index(Stage.HANDED))}"
    " FROM sessions LEFT JOIN (SELECT session AS owner, SUM(LENGTH(ids)) / 4 AS tokens, MIN(version) AS oldest,"
    " MAX(version) AS newest FROM deltas JOIN calls ON calls.n=call GROUP BY session) ON owner=sessions.n"
    " ORDER BY sessions.n"
)
INTEGRITY_CHECKS = {
    "deltas of no call": "SELECT COUNT(*) FROM deltas WHERE call NOT IN (SELECT n FROM calls)",
    "endings of no call": "SELECT COUNT(*) FROM endings WHERE call NOT IN (SELECT n FROM calls)",
    "calls of no session": "SELECT COUNT(*) FROM calls WHERE session NOT IN (SELECT n FROM sessions)",
    "calls whose base is missing": "SELECT COUNT(*) FROM calls WHERE base NOT IN (SELECT n FROM calls)",
    "tokens without a logprob": "SELECT COUNT(*) FROM deltas WHERE LENGTH(ids) != LENGTH(logprobs)",
}


LATER_CHECKS = {
    ROUTES: {"routes of no deltas": "SELECT COUNT(*) FROM routes WHERE delta NOT IN (SELECT n FROM deltas)"},
    IMAGE_USES: {
        "images of no session": "SELECT COUNT(*) FROM images WHERE digest NOT IN (SELECT digest FROM image_uses)",
        "images that are missing": "SELECT COUNT(*) FROM image_uses WHERE digest NOT IN (SELECT digest FROM images)",
    },
}
WHOLE_BYTES = 256 << 20  # up to this size a file is checked whole


class JournalReader:
    """The journal in the file `path`, for reading only.

    Every method raises JournalError if the file is missing or cannot be read as a journal, and ConfigError if it has
    another version. With `unwritten` no process may write the file meanwhile; reading leaves no file beside it.
    """

    def __init__(self, path: Path, *, unwritten: bool = False) -> None:
        self.path, self._unwritten = path, unwritten

    def restore(self) -> tuple[StoredSession, ...]:
        """All open sessions, oldest first."""
        with self.snapshot() as db:
            query = f"SELECT session_id FROM sessions WHERE {STAGE}=0 ORDER BY n"
            return tuple(_read_session(db, row[0]) for row in db.execute(query).fetchall())

    def not_handed_over(self) -> tuple[tuple[str, Stage], ...]:
        """The ids of closed sessions whose hand-over has not ended, oldest first, each with its stage."""
        with self.snapshot() as db:
            between = f"BETWEEN {STAGES.index(Stage.CLOSED)} AND {STAGES.index(Stage.HANDING)}"
            rows = db.execute(f"SELECT session_id, {STAGE} AS stage FROM sessions WHERE stage {between} ORDER BY n")
            return tuple((session_id, STAGES[stage]) for session_id, stage in rows)

    def stage(self, session_id: str) -> Stage | None:
        """The session's stage; None if it is unknown or deleted."""
        with self.snapshot() as db:
            row = db.execute(f"SELECT {STAGE} FROM sessions WHERE session_id=?", (session_id,)).fetchone()
            return STAGES[row[0]] if row else None

    def stages_of(self, uids: Iterable[str]) -> dict[str, Stage]:
        """The stages of all sessions of these prompts, by the sessions' ids."""
        query = f"SELECT session_id, {STAGE} FROM sessions WHERE uid=?"
        with self.snapshot() as db:
            return {name: STAGES[stage] for uid in uids for name, stage in db.execute(query, (uid,))}

    def read(self, session_id: str) -> StoredSession | None:
        """The whole session; None if it is unknown or deleted."""
        with self.snapshot() as db:
            row = db.execute("SELECT 1 FROM sessions WHERE session_id=?", (session_id,)).fetchone()
            return _read_session(db, session_id) if row else None

    def outside_events(self, *kinds: str) -> tuple[OutsideEvent, ...]:
        """What programs outside of the run did, or were refused, in the order of events; of these kinds, or of all."""
        with self.snapshot() as db:
            where = f"WHERE kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
            rows = db.execute(f"SELECT kind, subject, detail, at FROM outside_events {where} ORDER BY n", kinds)
            return tuple(OutsideEvent(kind, subject, from_json(detail), at) for kind, subject, detail, at in rows)

    def open_leases(self) -> tuple[OutsideEvent, ...]:
        """The events of this run's leases whose sessions were not handed over, in their order."""
        begun = f"(SELECT COALESCE(MAX(n), 0) FROM outside_events WHERE kind='{BEGUN}')"
        with self.snapshot() as db:
            leases = db.execute(f"SELECT subject, detail FROM outside_events WHERE kind='{LEASED}' AND n > {begun}")
            query = f"SELECT session_id FROM sessions WHERE {STAGE} < {STAGES.index(Stage.HANDED)}"
            sessions = {row[0] for row in db.execute(query)}
            found = [lease for lease, detail in leases if sessions and from_json(detail).get("session") in sessions]
            query = f"SELECT n, kind, subject, detail, at FROM outside_events WHERE subject=? AND n > {begun}"
            rows = sorted(row for lease in dict.fromkeys(found) for row in db.execute(query, (lease,)))
            return tuple(OutsideEvent(kind, subject, from_json(detail), at) for _, kind, subject, detail, at in rows)

    def has_writer(self) -> bool:
        """Whether a process has the journal open for writing now; True if that cannot be determined."""
        try:
            return is_locked(self.path)
        except OSError:
            return True

    def sessions(self) -> tuple[SessionSummary, ...]:
        """All sessions on record, oldest first. It counts all tokens, so it takes time on a large file."""
        found = []
        with self.snapshot() as db:
            groups, undone = read_groups(db), read_undone(db)
            for name, uid, settings, stage, reason, *counts, begun, done in db.execute(SUMMARIES):
                opened_at, calls, tokens, oldest, newest = counts
                known = name, uid, from_json(settings), STAGES[stage], reason, opened_at, calls, tokens, oldest, newest
                hand_over = note_of(begun), corrected_note(note_of(done), undone.get(name))
                found.append(SessionSummary(*known, *hand_over, groups.get(uid)))
        return tuple(found)

    def check_integrity(self) -> None:
        """Reads the whole file and checks that each row belongs to a row that exists.

        Raises:
            JournalError: some do not, or the file is damaged; the text has the counts.
        """
        with self.snapshot() as db:
            problems = [row[0] for row in db.execute("PRAGMA integrity_check(5)") if row[0] != "ok"]
            checks = dict(INTEGRITY_CHECKS)
            for table, more in LATER_CHECKS.items():
                checks |= more if has_table(db, table) else {}
            counts = {name: db.execute(query).fetchone()[0] for name, query in checks.items()}
        problems += [f"{count} {name}" for name, count in counts.items() if count]
        if problems:
            raise JournalError(str(self.path), "; ".join(problems), WAY_OUT)

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """A connection that sees one state of the file, closed after the block; its errors are the journal's."""
        db: sqlite3.Connection | None = None
        try:
            db = read_only(self.path, unwritten=self._unwritten)
            db.execute("BEGIN")
            check_version(db, self.path)
            yield db
        except sqlite3.Error as error:
            raise journal_error(self.path, error) from error
        except ConfigError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # of rows that no journal wrote
            reason = f"it has a row that cannot be read: {type(error).__name__}: {shorten(error)}"
            raise JournalError(str(self.path), reason, WAY_OUT) from error
        finally:
            if db is not None:
                db.close()


def read_closed_session(journal: JournalReader, session_id: str) -> SessionRecord:
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


def check_file(path: Path) -> None:
    """Reads a journal before a run continues it, as far as seconds allow; an empty file is a new one.

    No process may write it meanwhile. Neither the file nor its folder is changed. Up to `WHOLE_BYTES` all of it is
    read. Of a larger file only the ends of its tables are, which a cut takes away.

    Raises:
        ConfigError: it has another version.
        JournalError: it is another program's database, or damaged.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    reader = JournalReader(path, unwritten=True)
    if path.stat().st_size <= WHOLE_BYTES:
        reader.check_integrity()
        reader.restore()  # SQLite does not know what its rows mean
        reader.outside_events()
        return
    with reader.snapshot() as db:
        for table in TABLES:
            db.execute(f"SELECT max(rowid) FROM {table}").fetchall()


def _read_session(db: sqlite3.Connection, session_id: str) -> StoredSession:
    columns = ", ".join(NOTE.format(stage=STAGES.index(stage)) for stage in (Stage.HANDING, Stage.HANDED))
    query = f"SELECT n, uid, settings, opened_at, {STAGE}, {REASON}, {columns} FROM sessions WHERE session_id=?"
    n, uid, settings, opened_at, stage, reason, begun, done = db.execute(query, (session_id,)).fetchone()
    rewards = dict(db.execute("SELECT name, value FROM rewards WHERE session=? ORDER BY n", (n,)).fetchall())
    ended = corrected_note(note_of(done), read_undone(db, session_id).get(session_id) if done else None)
    known = (session_id, uid, from_json(settings), opened_at, STAGES[stage], reason, tuple(_read_calls(db, n)))
    given, refused = rewards | ended.get("rewards", {}), _read_refused(db, n, session_id)
    group, images = read_groups(db, uid).get(uid), _read_images(db, n)
    return StoredSession(*known, given, refused, note_of(begun), ended, group, rewards, images)


def _read_images(db: sqlite3.Connection, session: int) -> dict[str, bytes]:
    if not has_table(db, IMAGE_USES):
        return {}
    query = "SELECT digest, data FROM image_uses JOIN images USING (digest) WHERE session=?"
    return dict(db.execute(query, (session,)).fetchall())


def _read_refused(db: sqlite3.Connection, session: int, session_id: str) -> tuple[RequestRefused, ...]:
    query = "SELECT path, status, message, at FROM refused WHERE session=? ORDER BY n"
    return tuple(RequestRefused(session_id, *row) for row in db.execute(query, (session,)))


def note_of(text: str | None) -> dict[str, Any]:
    """The note of a stage of a hand-over."""
    return {} if text is None else from_json(text.encode())


def corrected_note(note: dict[str, Any], undone: Mapping[str, Any] | None) -> dict[str, Any]:
    """The note of a hand-over's end; one that was undone kept nothing."""
    return note if undone is None else note | {"kept": False, **undone}


def read_undone(db: sqlite3.Connection, session_id: str | None = None) -> dict[str, dict[str, Any]]:
    """The details of the sessions whose hand-over was undone, or of one, by the session's id."""
    where, values = ("", ()) if session_id is None else (" AND subject=?", (session_id,))
    rows = db.execute(f"SELECT subject, detail FROM outside_events WHERE kind='{UNDONE}'{where}", values)
    return {subject: from_json(detail) for subject, detail in rows}


def read_groups(db: sqlite3.Connection, uid: str | None = None) -> dict[str, StoredGroup]:
    """The last outcome of each prompt, or of one, unless it was undone."""
    where, values = ("", ()) if uid is None else ("WHERE uid=?", (uid,))
    rows = db.execute(f"SELECT uid, outcome, step, details FROM group_outcomes {where} ORDER BY n", values)
    last = {name: (GroupOutcome(outcome), step, details) for name, outcome, step, details in rows}
    return {
        name: StoredGroup(outcome, step, from_json(details))
        for name, (outcome, step, details) in last.items()
        if outcome is not GroupOutcome.UNDONE
    }


def _read_calls(db: sqlite3.Connection, session: int) -> Iterator[StoredCall]:
    query = WITH_ROUTES if has_table(db, ROUTES) else WITHOUT_ROUTES
    segments, of_prompts = _read_segments(db.execute(query, (session,)))
    sequences: dict[int, bytes] = {}  # prompt and generated ids of each call, for the calls that have it as their base
    requests: dict[int, bytes] = {}
    for n, call_id, digest, base, base_len, request_base, request_len, suffix, request, finish, reply in db.execute(
        CALLS, (session,)
    ):
        prompt = sequences[base][:base_len] + suffix if base_len else suffix
        requests[n] = requests[request_base][:request_len] + request if request_len else request
        sequences[n] = prompt + b"".join(pack(segment.ids) for segment in segments[n])
        end = None if finish is None else Finish(finish)
        given, sent = from_json(requests[n]), {} if reply is None else from_json(reply)
        made = (tuple(segments[n]), end, given, sent, of_prompts.get(n))
        yield StoredCall(call_id, digest, unpack(TOKEN, prompt), *made)


def _read_segments(rows: Iterable[tuple[Any, ...]]) -> tuple[defaultdict[int, list[Segment]], dict[int, Routes]]:
    """Each call's segments, and its prompt's routes; adjacent chunks of one version and replica are one segment."""
    segments: defaultdict[int, list[Segment]] = defaultdict(list)
    of_prompts: dict[int, Routes] = {}
    for call, version, replica, ids, logprobs, grammar, of_tokens, of_prompt in rows:
        beside = (version, replica, bytearray(grammar or b""), unpacked(of_tokens))
        append_chunk(segments[call], Segment(unpack(TOKEN, ids), unpack(LOGPROB, logprobs), *beside))
        if (routes := unpacked(of_prompt)) is not None:
            of_prompts.setdefault(call, routes)
    return segments, of_prompts
