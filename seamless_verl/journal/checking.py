"""Checks the journal of an earlier run before another one continues it, and changes nothing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from seamless_verl.journal.reader import JournalReader
from seamless_verl.journal.schema import TABLES

WHOLE_BYTES = 256 << 20  # up to this size everything is read


def check_file(path: Path) -> None:
    """Reads the journal, as far as seconds allow; an empty file is a new one. No process may write it meanwhile.

    Neither the file nor its folder is changed. Up to `WHOLE_BYTES` all of it is read (`JournalReader.check_integrity`).
    Of a larger file only the ends of its tables are, which a cut takes away.

    Raises:
        ConfigError: a newer release made it.
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
        for table in _tables_of(db):
            db.execute(f"SELECT max(rowid) FROM {table}").fetchall()


def _tables_of(db: sqlite3.Connection) -> list[str]:
    """Those of TABLES that the file has; one of an earlier release lacks the later ones."""
    present = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    return [table for table in TABLES if table in present]
