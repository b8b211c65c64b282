"""Deleting what was handed over, a piece at a time between the writer's transactions.

Invariant: only HANDED sessions are deleted, each in one transaction, so a reader sees all of one or nothing.

Group commit: many appends, one transaction, one answer to each.

Invariant: an answer is sent after the transaction that holds its events was committed.

The embedded journal: one file, one writer thread, group commit.

Invariants: the writer thread alone owns the writing connection and the book; a waiter is answered after
the commit that holds its events, and only then; after a failure of the disk nothing is accepted until
the journal is opened again, so no call can have a hole; each reading opens a connection of its own.

Callers wait for their appends, so what is queued is bounded by how many callers there are.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, TypeAlias

from seamless_verl.errors import JournalError
from seamless_verl.journal import writer as compaction
from seamless_verl.journal.events import Event
from seamless_verl.journal.protocol import Compacted, Stage
from seamless_verl.journal.reader import JournalReader
from seamless_verl.journal.schema import writing
from seamless_verl.journal.validator import STAGES, Rows, Validator

PAGES = 2000  # given back to the file system in one piece; a few milliseconds
HANDED = STAGES.index(Stage.HANDED)
CHILDREN = ("deltas", "endings")


def step(db: sqlite3.Connection, before: float, max_bytes: int | None) -> tuple[int, bool]:
    """Do one piece: sessions deleted, and whether there is more to do."""
    session = _victim(db, before, max_bytes)
    if session is not None:
        _delete(db, session)
        return 1, True
    if _pragma(db, "freelist_count") > 0:
        db.execute(f"PRAGMA incremental_vacuum({PAGES})").fetchall()
        db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # the file shrinks now; PASSIVE waits for no reader
    return 0, _pragma(db, "freelist_count") > 0


def bytes_held(db: sqlite3.Connection) -> int:
    """Bytes of the pages in use."""
    return (_pragma(db, "page_count") - _pragma(db, "freelist_count")) * _pragma(db, "page_size")


def _victim(db: sqlite3.Connection, before: float, max_bytes: int | None) -> int | None:
    query = "SELECT session, at FROM stages WHERE stage=? ORDER BY at LIMIT 1"
    oldest = db.execute(query, (HANDED,)).fetchone()
    if oldest is None:
        return None
    too_large = max_bytes is not None and bytes_held(db) > max_bytes
    return int(oldest[0]) if oldest[1] < before or too_large else None


def _delete(db: sqlite3.Connection, session: int) -> None:
    db.execute("BEGIN IMMEDIATE")
    for table in CHILDREN:
        db.execute(f"DELETE FROM {table} WHERE call IN (SELECT n FROM calls WHERE session=?)", (session,))
    for table in ("calls", "rewards", "stages"):
        db.execute(f"DELETE FROM {table} WHERE session=?", (session,))
    db.execute("DELETE FROM sessions WHERE n=?", (session,))
    db.execute("COMMIT")


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


CHUNK = 64  # deltas in one statement: each statement gives up the interpreter lock and must win it back

Answer: TypeAlias = "tuple[Append, Exception | None]"


@dataclass(frozen=True)
class Append:
    """Events on their way, and who waits for them; `loop` is None for a waiter of a thread."""

    events: Sequence[Event]
    waiter: asyncio.Future[None] | Future[None]
    loop: asyncio.AbstractEventLoop | None


def commit(db: sqlite3.Connection, book: Validator, group: Iterable[Append]) -> None:
    """Make the group durable and answer it; an append that was refused hears why, alone.

    Raises:
        sqlite3.Error: the disk failed; nobody was answered and nothing was written.
    """
    answers = [(append, _refusal(book, append)) for append in group]
    rows = book.take()
    if any(rows.values()):
        db.execute("BEGIN IMMEDIATE")
        _insert(db, rows)
        db.execute("COMMIT")
    answer(answers)


def _refusal(book: Validator, append: Append) -> Exception | None:
    try:
        book.enter(append.events)
    except sqlite3.Error:
        raise
    except Exception as error:  # the answer to whoever appended it, and nobody else's
        return error
    return None


def _insert(db: sqlite3.Connection, rows: Rows) -> None:
    for table, entries in rows.items():
        if table == "deltas":
            _insert_deltas(db, entries)
        elif entries:
            db.executemany(f"INSERT INTO {table} VALUES ({_marks(len(entries[0]))})", entries)


def _insert_deltas(db: sqlite3.Connection, entries: list[tuple[Any, ...]]) -> None:
    for start in range(0, len(entries), CHUNK):
        some = entries[start : start + CHUNK]
        values = ", ".join([f"({_marks(5)})"] * len(some))
        db.execute(f"INSERT INTO deltas (call, version, replica, ids, logprobs) VALUES {values}", [*chain(*some)])


def _marks(count: int) -> str:
    return ", ".join("?" * count)


def answer(answers: Iterable[Answer]) -> None:
    """Tell the waiters, each loop being woken once."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[Answer]] = defaultdict(list)
    for append, error in answers:
        if append.loop is None:
            _resolve(append, error)
        else:
            by_loop[append.loop].append((append, error))
    for loop, those in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve_all, those)
        except RuntimeError:
            if not loop.is_closed():  # with its loop, whoever waited is gone
                raise


def _resolve_all(answers: Iterable[Answer]) -> None:
    for append, error in answers:
        _resolve(append, error)


def _resolve(append: Append, error: Exception | None) -> None:
    if append.waiter.done():
        return
    if error is None:
        append.waiter.set_result(None)
    else:
        append.waiter.set_exception(error)


GROUP = 1024  # appends in one transaction at most, so that the first of them does not wait for ever


@dataclass
class _Compact:
    before: float
    max_bytes: int | None
    waiter: Future[Compacted]
    sessions: int = 0


_Job: TypeAlias = "Append | _Compact | None"  # None: stop


class SqliteJournal(JournalReader):
    """A `Journal` in one SQLite file, for event loops (`append`) and for threads (`submit`).

    What was acknowledged survives the death of any process. After a power failure the file is sound, but the last
    moments before it may be missing: no commit waits for the disk to be flushed.

    Args:
        path: the file; made if missing. `-wal`, `-shm` and `-lock` files lie beside it.

    Raises:
        ConfigError: another journal writes to this file, or a newer release made it.
        JournalError: the file cannot be opened as a journal.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._queue: SimpleQueue[_Job] = SimpleQueue()
        self._gate = threading.Lock()
        self._over: JournalError | None = None
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="journal", daemon=True)
        self._thread.start()
        opened.result()

    def append(self, *events: Event) -> asyncio.Future[None]:
        """See `Journal.append`."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._send(Append(events, waiter, loop))
        return waiter

    def submit(self, *events: Event) -> Future[None]:
        """`append` for threads without an event loop."""
        waiter: Future[None] = Future()
        self._send(Append(events, waiter, None))
        return waiter

    async def compact(self, before: float, max_bytes: int | None = None) -> Compacted:
        """See `Journal.compact`; appends go on between its pieces."""
        job = _Compact(before, max_bytes, Future())
        self._send(job)
        return await asyncio.wrap_future(job.waiter)

    def close(self) -> None:
        """See `Journal.close`; afterwards no thread and no file is left open."""
        with self._gate:
            if self._over is None:
                self._over = JournalError(str(self.path), "it is closed", "Open it again to go on")
                self._queue.put(None)
        self._thread.join()

    def __enter__(self) -> SqliteJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, job: _Job) -> None:
        with self._gate:
            if self._over is not None:
                raise self._over
            self._queue.put(job)

    def _run(self, opened: Future[None]) -> None:
        """The writer thread; whatever stops it is told to everyone who waits."""
        taken: list[_Job] = []
        try:
            with writing(self.path) as db:
                book = Validator(db)
                opened.set_result(None)
                while None not in taken:
                    taken = self._gather()
                    self._work(db, book, taken)
        except Exception as error:
            self._stop(error, taken)
            if not opened.done():
                opened.set_exception(error)
        self._refuse(self._drain())

    def _gather(self) -> list[_Job]:
        jobs = [self._queue.get()]
        while len(jobs) < GROUP and jobs[-1] is not None:
            try:
                jobs.append(self._queue.get_nowait())
            except Empty:
                break
        return jobs

    def _work(self, db: sqlite3.Connection, book: Validator, jobs: list[_Job]) -> None:
        commit(db, book, [job for job in jobs if isinstance(job, Append)])
        for job in jobs:
            if isinstance(job, _Compact):
                self._compact(db, job)

    def _compact(self, db: sqlite3.Connection, job: _Compact) -> None:
        deleted, more = compaction.step(db, job.before, job.max_bytes)
        job.sessions += deleted
        if more:
            self._queue.put(job)
        else:
            job.waiter.set_result(Compacted(job.sessions, compaction.bytes_held(db)))

    def _stop(self, error: Exception, taken: list[_Job]) -> None:
        way_out = "Open the journal again; only what was acknowledged is in it"
        with self._gate:
            if not isinstance(error, JournalError):
                error = JournalError(str(self.path), f"its writer stopped: {error!r}", way_out)
            self._over = error
        self._refuse(taken)

    def _drain(self) -> list[_Job]:
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    def _refuse(self, jobs: list[_Job]) -> None:
        answer((job, self._over) for job in jobs if isinstance(job, Append))
        for job in jobs:
            if isinstance(job, _Compact) and not job.waiter.done():
                job.waiter.set_exception(self._over)
