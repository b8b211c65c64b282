"""The embedded journal: one SQLite file, one writer thread, group commit, compaction.

Group commit: many appends share one transaction, and each append gets its own result. Compaction deletes sessions
that were handed over, in short steps between the transactions.

What it guarantees:
1. An append that has resolved survives the death of any process, completely: all its events or none. After a power
   failure the file is valid, but the last moments before it may be missing: no commit waits until the disk is flushed.
2. Appends take effect in the order of the calls to `append` in one thread.
3. A session that was open is restored with every acknowledged token and continues under its own id.
4. A closed session can be read completely until it was handed over: its consumer may receive it again, and counts it
   once (`stored.py`).
5. Only sessions that were handed over are ever deleted, each in one transaction, so a reader sees all of one or
   nothing, and before them, where the file is too large, their routes; and of the events from outside of the run what
   no restart needs.

Invariants:
- Only the writer thread uses the writing connection and the validator.
- An append is resolved after the commit that holds its events, never earlier.
- After a failure of the disk nothing is accepted until the journal is opened again, so no call can have a gap.

Callers wait for their appends, so the number of callers bounds the queue.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from seamless_verl.errors import JournalError
from seamless_verl.journal.events import BEGUN, LEASED, RUN, UNDONE, Event
from seamless_verl.journal.reader import STAGE, JournalReader
from seamless_verl.journal.schema import (
    IMAGE_USES,
    LATER,
    REPEATED,
    ROUTES,
    from_json,
    has_table,
    open_for_writing,
)
from seamless_verl.journal.stored import CompactionResult, Stage
from seamless_verl.journal.validator import STAGES, Rows, Validator

MAX_GROUP = 1024  # appends in one transaction, so that the first of them does not wait for ever
ROWS_PER_STATEMENT = 64  # a power of two; each statement releases the interpreter lock and must acquire it again
DELETED_AT_ONCE = 32  # sessions; appends that wait meanwhile are late by a few milliseconds
EVENTS_AT_ONCE = 256  # from outside of the run, that are looked at in one step
VACUUM_PAGES = 2000  # returned to the file system in one step; a few milliseconds
HANDED = STAGES.index(Stage.HANDED)


@dataclass(frozen=True)
class PendingAppend:
    """Events in the queue, and the future of their append; `loop` is None if a thread waits for it."""

    events: Sequence[Event]
    waiter: asyncio.Future[None] | Future[None]
    loop: asyncio.AbstractEventLoop | None


@dataclass
class _PendingCompaction:
    before: float
    max_bytes: int | None
    keep: Collection[str]
    waiter: Future[CompactionResult]
    sessions: int = 0
    begun: int | None = None  # the row in which the record of this run began
    looked_at: int = 0  # the last row of the events from outside that it has looked at


_Job: TypeAlias = PendingAppend | _PendingCompaction | None  # None: stop


class SqliteJournal(JournalReader):
    """A journal in the file `path`, created if missing; `-wal`, `-shm` and `-lock` files are beside it.

    Only `append` and `compact` may be called in a running event loop; the other methods block.

    Raises:
        ConfigError: another journal writes to this file, or it has another version.
        JournalError: the file cannot be opened as a journal.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._queue: SimpleQueue[_Job] = SimpleQueue()
        self._lock = threading.Lock()
        self._refusal: JournalError | None = None  # once set, no job is accepted
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="journal", daemon=True)
        self._thread.start()
        opened.result()

    def append(self, *events: Event) -> asyncio.Future[None]:
        """Queues these events now; the future resolves when all of them are durable.

        Cancelling it does not withdraw the events.

        Raises:
            JournalOrderError: (awaited) one cannot follow what is on record; none was written, the journal is usable.
            JournalError: (awaited, or at once) the disk failed, now or earlier, or the journal is closed.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._enqueue(PendingAppend(events, waiter, loop))
        return waiter

    def submit(self, *events: Event) -> Future[None]:
        """`append` for threads without an event loop."""
        waiter: Future[None] = Future()
        self._enqueue(PendingAppend(events, waiter, None))
        return waiter

    async def compact(
        self, before: float, max_bytes: int | None = None, keep: Collection[str] = ()
    ) -> CompactionResult:
        """Deletes what is older than that, then the oldest while over `max_bytes`; appends are written meanwhile.

        That is sessions that were handed over, but those of `keep`, and before these the events from outside of the
        run that no restart needs.
        """
        job = _PendingCompaction(before, max_bytes, keep, Future())
        self._enqueue(job)
        return await asyncio.wrap_future(job.waiter)

    def close(self) -> None:
        """Makes durable what was appended, then refuses everything else; a second call does nothing."""
        with self._lock:
            if self._refusal is None:
                self._refusal = JournalError(str(self.path), "it is closed", "Open it again to go on")
                self._queue.put(None)
        self._thread.join()

    def __enter__(self) -> SqliteJournal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _enqueue(self, job: _Job) -> None:
        with self._lock:
            if self._refusal is not None:
                raise fresh(self._refusal)
            self._queue.put(job)

    def _run(self, opened: Future[None]) -> None:
        """The writer thread. If it fails, every waiter gets the error."""
        jobs: list[_Job] = []
        try:
            with open_for_writing(self.path) as db:
                validator = Validator(db)
                opened.set_result(None)
                while None not in jobs:
                    jobs = self._next_jobs()
                    self._process(db, validator, jobs)
        except Exception as error:  # the thread's supervisor: every waiting caller gets the error
            self._fail(error, jobs)
            if not opened.done():
                opened.set_exception(error)
        self._reject(self._drain())

    def _next_jobs(self) -> list[_Job]:
        """Waits for a job; returns it with those queued behind it, in order."""
        jobs = [self._queue.get()]
        while len(jobs) < MAX_GROUP and jobs[-1] is not None:
            try:
                jobs.append(self._queue.get_nowait())
            except Empty:
                break
        return jobs

    def _process(self, db: sqlite3.Connection, validator: Validator, jobs: list[_Job]) -> None:
        commit_group(db, validator, [job for job in jobs if isinstance(job, PendingAppend)])
        for job in jobs:
            if isinstance(job, _PendingCompaction):
                self._compact(db, job)

    def _compact(self, db: sqlite3.Connection, job: _PendingCompaction) -> None:
        if job.begun is None:
            job.begun = _last_begin(db)
        if (looked_at := _delete_events(db, job, job.begun)) is not None:
            job.looked_at, more = looked_at, True
        else:
            job.looked_at = sys.maxsize
            deleted, more = compact_step(db, job.before, job.max_bytes, job.keep)
            job.sessions += deleted
        if more:
            self._queue.put(job)
        else:
            job.waiter.set_result(CompactionResult(job.sessions, used_bytes(db)))

    def _fail(self, error: Exception, jobs: list[_Job]) -> None:
        way_out = "Open the journal again; only what was acknowledged is in it"
        with self._lock:
            if not isinstance(error, JournalError):
                error = JournalError(str(self.path), f"its writer stopped: {error!r}", way_out)
            self._refusal = error
        self._reject(jobs)

    def _drain(self) -> list[_Job]:
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    def _reject(self, jobs: list[_Job]) -> None:
        assert self._refusal is not None
        resolve_appends((job, fresh(self._refusal)) for job in jobs if isinstance(job, PendingAppend))
        for job in jobs:
            if isinstance(job, _PendingCompaction) and not job.waiter.done():
                job.waiter.set_exception(fresh(self._refusal))


def fresh(error: JournalError) -> JournalError:
    """The same error without its traceback, which grows with each `raise` of one exception."""
    return JournalError(*error.args)


AppendResult: TypeAlias = tuple[PendingAppend, Exception | None]


def commit_group(db: sqlite3.Connection, validator: Validator, group: Iterable[PendingAppend]) -> None:
    """Makes the group durable and resolves it; a rejected append fails alone, with its own error.

    Raises:
        sqlite3.Error: the disk failed; no append was resolved and nothing was written.
    """
    results = [(append, _validate(validator, append)) for append in group]
    rows = validator.take_rows()
    if any(rows.values()):
        db.execute("BEGIN IMMEDIATE")
        _insert(db, rows)
        db.execute("COMMIT")
    resolve_appends(results)


def _validate(validator: Validator, append: PendingAppend) -> Exception | None:
    """Applies the events; returns the error if they are rejected."""
    try:
        validator.apply(append.events)
    except sqlite3.Error:
        raise
    except Exception as error:  # the result of this append only
        return error
    return None


def _insert(db: sqlite3.Connection, rows: Rows) -> None:
    for table, entries in rows.items():
        if table == "deltas":
            _insert_chunks(db, entries)
        elif table == "group_outcomes":
            known = "WHERE EXISTS (SELECT 1 FROM sessions WHERE uid=?2)"
            db.executemany(f"INSERT INTO group_outcomes SELECT ?1, ?2, ?3, ?4, ?5, ?6 {known}", entries)
        elif entries:
            for made in LATER.get(table, ()):
                db.execute(made)
            insert = "INSERT OR IGNORE" if table in REPEATED else "INSERT"
            db.executemany(f"{insert} INTO {table} VALUES ({_placeholders(len(entries[0]))})", entries)


def _insert_chunks(db: sqlite3.Connection, entries: list[tuple[Any, ...]]) -> None:
    start, size = 0, ROWS_PER_STATEMENT
    while start < len(entries):
        while size > len(entries) - start:
            size //= 2  # few statements, since each that was run stays compiled
        values = ", ".join([f"({_placeholders(7)})"] * size)
        db.execute(f"INSERT INTO deltas VALUES {values}", [*chain(*entries[start : start + size])])
        start += size


def _placeholders(count: int) -> str:
    return ", ".join("?" * count)


def resolve_appends(results: Iterable[AppendResult]) -> None:
    """Resolves the appends' futures; each event loop is woken once."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[AppendResult]] = defaultdict(list)
    for append, error in results:
        if append.loop is None:
            _resolve(append, error)
        else:
            by_loop[append.loop].append((append, error))
    for loop, loop_results in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve_all, loop_results)
        except RuntimeError:
            if not loop.is_closed():  # nobody waits in a closed loop
                raise


def _resolve_all(results: Iterable[AppendResult]) -> None:
    for append, error in results:
        _resolve(append, error)


def _resolve(append: PendingAppend, error: Exception | None) -> None:
    if append.waiter.done():
        return
    if error is None:
        append.waiter.set_result(None)
    else:
        append.waiter.set_exception(error)


def _last_begin(db: sqlite3.Connection) -> int:
    """The row of the last event of kind BEGUN."""
    return int(db.execute("SELECT COALESCE(MAX(n), 0) FROM outside_events WHERE kind=?", (BEGUN,)).fetchone()[0])


def _delete_events(db: sqlite3.Connection, job: _PendingCompaction, begun: int) -> int | None:
    """Deletes some events from outside of the run that are too old, or any while the file is too large.

    Returns the last row that it looked at; None if there is no more to look at.
    """
    until = inf if is_too_large(db, job.max_bytes) else job.before
    query = "SELECT n, kind, subject FROM outside_events WHERE n > ? AND at < ? ORDER BY n LIMIT ?"
    rows = db.execute(query, (job.looked_at, until, EVENTS_AT_ONCE)).fetchall()
    if not rows:
        return None
    gone = [(n,) for n, kind, subject in rows if not _is_needed(db, kind, subject, begun)]
    db.execute("BEGIN IMMEDIATE")
    db.executemany("DELETE FROM outside_events WHERE n=?", gone)
    db.execute("COMMIT")
    return int(rows[-1][0])


def _is_needed(db: sqlite3.Connection, kind: str, subject: str, begun: int) -> bool:
    """Whether a restart, or a reader of a session that is on record, needs this event."""
    if kind in (BEGUN, RUN):
        return True
    if kind == UNDONE:
        return db.execute("SELECT 1 FROM sessions WHERE session_id=?", (subject,)).fetchone() is not None
    query = "SELECT detail FROM outside_events WHERE subject=? AND kind=? AND n > ?"
    lease = db.execute(query, (subject, LEASED, begun)).fetchone()
    if lease is None:
        return False
    query = f"SELECT {STAGE} FROM sessions WHERE session_id=?"
    stage = db.execute(query, (from_json(lease[0]).get("session"),)).fetchone()
    return stage is not None and stage[0] < HANDED


def compact_step(
    db: sqlite3.Connection, before: float, max_bytes: int | None, keep: Collection[str] = ()
) -> tuple[int, bool]:
    """One step of a compaction: (number of sessions deleted, whether there is more to do)."""
    if _delete_routes(db, max_bytes, keep):
        return 0, True
    if deleted := _delete_some(db, before, max_bytes, keep):
        return deleted, True
    if _pragma(db, "freelist_count") > 0:
        db.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")  # `execute` returns after its first page
        db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # the file shrinks now; PASSIVE waits for no reader
    return 0, _pragma(db, "freelist_count") > 0


def used_bytes(db: sqlite3.Connection) -> int:
    """Bytes of the pages in use."""
    return (_pragma(db, "page_count") - _pragma(db, "freelist_count")) * _pragma(db, "page_size")


def is_too_large(db: sqlite3.Connection, max_bytes: int | None) -> bool:
    return max_bytes is not None and used_bytes(db) > max_bytes


def _delete_routes(db: sqlite3.Connection, max_bytes: int | None, keep: Collection[str]) -> int:
    """Deletes the routes of up to `DELETED_AT_ONCE` sessions while the file is too large; returns of how many.

    Those that were handed over first: only a run that goes on from weights before their step would read them again.
    """
    if not is_too_large(db, max_bytes) or not has_table(db, ROUTES):
        return 0
    query = (
        "SELECT session, session_id FROM stages JOIN sessions ON n=session WHERE stage=?"
        " AND session IN (SELECT session FROM routes) ORDER BY at"
    )
    handed = (n for n, session_id in db.execute(query, (HANDED,)) if session_id not in keep)
    deleted = 0
    db.execute("BEGIN IMMEDIATE")
    for session in list(islice(handed, DELETED_AT_ONCE)):
        if not is_too_large(db, max_bytes):
            break
        db.execute("DELETE FROM routes WHERE session=?", (session,))
        deleted += 1
    db.execute("COMMIT")
    return deleted


def _delete_some(db: sqlite3.Connection, before: float, max_bytes: int | None, keep: Collection[str]) -> int:
    """Deletes up to `DELETED_AT_ONCE` sessions in one transaction, those that were handed over first; returns how many.

    All are old enough, or the file is too large with them.
    """
    query = "SELECT session, session_id, stages.at FROM stages JOIN sessions ON n=session WHERE stage=? ORDER BY at"
    handed = ((n, at) for n, session_id, at in db.execute(query, (HANDED,)) if session_id not in keep)
    deleted = 0
    db.execute("BEGIN IMMEDIATE")
    for session, at in list(islice(handed, DELETED_AT_ONCE)):
        if not (at < before or is_too_large(db, max_bytes)):
            break
        _delete(db, session)
        deleted += 1
    db.execute("COMMIT")
    return deleted


def _delete(db: sqlite3.Connection, session: int) -> None:
    for table in ("deltas", "endings"):
        db.execute(f"DELETE FROM {table} WHERE call IN (SELECT n FROM calls WHERE session=?)", (session,))
    for table in ("calls", "rewards", "refused", "stages", *((ROUTES,) if has_table(db, ROUTES) else ())):
        db.execute(f"DELETE FROM {table} WHERE session=?", (session,))
    if has_table(db, IMAGE_USES):
        _delete_images(db, session)
    uid = db.execute("SELECT uid FROM sessions WHERE n=?", (session,)).fetchone()[0]
    db.execute("DELETE FROM sessions WHERE n=?", (session,))
    db.execute("DELETE FROM group_outcomes WHERE uid=?1 AND NOT EXISTS (SELECT 1 FROM sessions WHERE uid=?1)", (uid,))


def _delete_images(db: sqlite3.Connection, session: int) -> None:
    """Deletes the session's images that no other session has."""
    found = db.execute("DELETE FROM image_uses WHERE session=? RETURNING digest", (session,)).fetchall()
    alone = "NOT EXISTS (SELECT 1 FROM image_uses WHERE digest=?1)"
    db.executemany(f"DELETE FROM images WHERE digest=?1 AND {alone}", found)


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])
