"""Deleting what was handed over, a piece at a time between the writer's transactions.

Invariant: only HANDED sessions are deleted, each in one transaction, so a reader sees all of one or nothing.
"""

from __future__ import annotations

import sqlite3

from seamless_verl.trajectory.journal.book import STAGES
from seamless_verl.trajectory.journal.recorded import Stage

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
