"""Group commit: many appends, one transaction, one answer to each.

Invariant: an answer is sent after the transaction that holds its events was committed.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from seamless_verl.trajectory.journal.book import Book, Rows
from seamless_verl.trajectory.journal.events import Event

CHUNK = 64  # deltas in one statement: each statement gives up the interpreter lock and must win it back

Answer: TypeAlias = "tuple[Append, Exception | None]"


@dataclass(frozen=True)
class Append:
    """Events on their way, and who waits for them; `loop` is None for a waiter of a thread."""

    events: Sequence[Event]
    waiter: asyncio.Future[None] | Future[None]
    loop: asyncio.AbstractEventLoop | None


def commit(db: sqlite3.Connection, book: Book, group: Iterable[Append]) -> None:
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


def _refusal(book: Book, append: Append) -> Exception | None:
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
