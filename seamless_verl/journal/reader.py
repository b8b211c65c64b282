"""Reads a journal, also while another process writes it.

Invariant: each method reads one snapshot over a connection of its own and closes it before it returns; it delays no
writer. All methods block: a gateway reads before it serves, or in a thread.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from seamless_verl.errors import JournalError
from seamless_verl.journal.protocol import SessionSummary, Stage, StoredCall, StoredSession
from seamless_verl.journal.schema import check_version, from_json, journal_error, pack, unpack_ids, unpack_logprobs
from seamless_verl.journal.validator import STAGES
from seamless_verl.runtime.locks import is_locked
from seamless_verl.trajectory.records import Finish, Segment, append_chunk

STAGE = "COALESCE((SELECT MAX(stage) FROM stages WHERE session=sessions.n), 0)"
REASON = f"(SELECT note FROM stages WHERE session=sessions.n AND stage={STAGES.index(Stage.CLOSED)})"
CALLS = (
    "SELECT n, call_id, digest, base, base_len, request_base, request_len, suffix, request, finish, reply"
    " FROM calls LEFT JOIN endings ON call=n WHERE session=? ORDER BY n"
)
CHUNKS = (
    "SELECT call, version, name, ids, logprobs FROM deltas JOIN replicas ON replicas.n=replica"
    " WHERE call IN (SELECT n FROM calls WHERE session=?) ORDER BY deltas.n"
)
SUMMARIES = (
    f"SELECT session_id, uid, {STAGE}, opened_at, {REASON},"
    " (SELECT COUNT(*) FROM calls WHERE session=sessions.n),"
    " (SELECT COALESCE(SUM(LENGTH(ids)), 0) / 4 FROM deltas JOIN calls ON calls.n=call WHERE session=sessions.n)"
    " FROM sessions ORDER BY n"
)
INTEGRITY_CHECKS = {
    "deltas of no call": "SELECT COUNT(*) FROM deltas WHERE call NOT IN (SELECT n FROM calls)",
    "endings of no call": "SELECT COUNT(*) FROM endings WHERE call NOT IN (SELECT n FROM calls)",
    "calls of no session": "SELECT COUNT(*) FROM calls WHERE session NOT IN (SELECT n FROM sessions)",
    "calls whose base is missing": "SELECT COUNT(*) FROM calls WHERE base NOT IN (SELECT n FROM calls)",
    "tokens without a logprob": "SELECT COUNT(*) FROM deltas WHERE LENGTH(ids) != LENGTH(logprobs)",
}


class JournalReader:
    """The journal in the file `path`, for reading only.

    Every method raises JournalError if the file is missing or cannot be read as a journal, and ConfigError if a
    newer release made it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def restore(self) -> tuple[StoredSession, ...]:
        """All open sessions, oldest first."""
        with self._snapshot() as db:
            query = f"SELECT session_id FROM sessions WHERE {STAGE}=0 ORDER BY n"
            return tuple(_read_session(db, row[0]) for row in db.execute(query).fetchall())

    def stage(self, session_id: str) -> Stage | None:
        """The session's stage; None if it is unknown or deleted."""
        with self._snapshot() as db:
            row = db.execute(f"SELECT {STAGE} FROM sessions WHERE session_id=?", (session_id,)).fetchone()
            return STAGES[row[0]] if row else None

    def read(self, session_id: str) -> StoredSession | None:
        """The whole session; None if it is unknown or deleted."""
        with self._snapshot() as db:
            row = db.execute("SELECT 1 FROM sessions WHERE session_id=?", (session_id,)).fetchone()
            return _read_session(db, session_id) if row else None

    def has_writer(self) -> bool:
        """Whether a process has the journal open for writing now; True if that cannot be determined."""
        try:
            return is_locked(self.path)
        except OSError:
            return True

    def sessions(self) -> tuple[SessionSummary, ...]:
        """All sessions on record, oldest first. It counts all tokens, so it takes time on a large file."""
        with self._snapshot() as db:
            return tuple(
                SessionSummary(session_id, uid, STAGES[stage], opened_at, calls, tokens, reason)
                for session_id, uid, stage, opened_at, reason, calls, tokens in db.execute(SUMMARIES)
            )

    def check_integrity(self) -> None:
        """Reads the whole file and checks that each row belongs to a row that exists.

        Raises:
            JournalError: some do not, or the file is damaged; the text has the counts.
        """
        with self._snapshot() as db:
            problems = [row[0] for row in db.execute("PRAGMA integrity_check(5)") if row[0] != "ok"]
            counts = {name: db.execute(query).fetchone()[0] for name, query in INTEGRITY_CHECKS.items()}
        problems += [f"{count} {name}" for name, count in counts.items() if count]
        if problems:
            raise JournalError(str(self.path), "; ".join(problems), "Restore the file from a copy, or start a new one")

    @contextmanager
    def _snapshot(self) -> Iterator[sqlite3.Connection]:
        db: sqlite3.Connection | None = None
        try:
            db = sqlite3.connect(f"file:{quote(str(self.path))}?mode=ro", uri=True, isolation_level=None)
            db.execute("BEGIN")
            check_version(db, self.path)
            yield db
        except sqlite3.Error as error:
            raise journal_error(self.path, error) from error
        finally:
            if db is not None:
                db.close()


def _read_session(db: sqlite3.Connection, session_id: str) -> StoredSession:
    query = f"SELECT n, uid, settings, opened_at, {STAGE}, {REASON} FROM sessions WHERE session_id=?"
    n, uid, settings, opened_at, stage, reason = db.execute(query, (session_id,)).fetchone()
    rewards = dict(db.execute("SELECT name, value FROM rewards WHERE session=? ORDER BY n", (n,)).fetchall())
    calls = tuple(_read_calls(db, n))
    return StoredSession(session_id, uid, from_json(settings), opened_at, STAGES[stage], reason, calls, rewards)


def _read_calls(db: sqlite3.Connection, session: int) -> Iterator[StoredCall]:
    segments = _read_segments(db.execute(CHUNKS, (session,)))
    sequences: dict[int, bytes] = {}  # prompt and generated ids of each call, for the calls that have it as their base
    requests: dict[int, bytes] = {}
    for n, call_id, digest, base, base_len, request_base, request_len, suffix, request, finish, reply in db.execute(
        CALLS, (session,)
    ):
        prompt = sequences[base][:base_len] + suffix if base_len else suffix
        requests[n] = requests[request_base][:request_len] + request if request_len else request
        sequences[n] = prompt + b"".join(pack(segment.ids) for segment in segments[n])
        yield StoredCall(
            call_id,
            digest,
            unpack_ids(prompt),
            tuple(segments[n]),
            None if finish is None else Finish(finish),
            from_json(requests[n]),
            from_json(reply) if reply is not None else {},
        )


def _read_segments(rows: Iterable[tuple[int, int, str, bytes, bytes]]) -> defaultdict[int, list[Segment]]:
    """Each call's segments; adjacent chunks of one version and replica are one segment."""
    segments: defaultdict[int, list[Segment]] = defaultdict(list)
    for call, version, replica, ids, logprobs in rows:
        append_chunk(segments[call], Segment(unpack_ids(ids), unpack_logprobs(logprobs), version, replica))
    return segments
