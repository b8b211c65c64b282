"""The embedded journal: one file, one writer thread, group commit.

Invariants: the writer thread alone owns the writing connection and the book; a waiter is answered after
the commit that holds its events, and only then; after a failure of the disk nothing is accepted until
the journal is opened again, so no call can have a hole; each reading opens a connection of its own.

Callers wait for their appends, so what is queued is bounded by how many callers there are.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TypeAlias

from seamless_verl.errors import JournalError
from seamless_verl.trajectory.journal import compaction
from seamless_verl.trajectory.journal.book import Book
from seamless_verl.trajectory.journal.events import Event
from seamless_verl.trajectory.journal.group import Append, answer, commit
from seamless_verl.trajectory.journal.protocol import Compacted
from seamless_verl.trajectory.journal.reader import JournalReader
from seamless_verl.trajectory.journal.schema import writing

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
                book = Book(db)
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

    def _work(self, db: sqlite3.Connection, book: Book, jobs: list[_Job]) -> None:
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
