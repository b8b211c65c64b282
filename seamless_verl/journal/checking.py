"""Checks the journal of an earlier run before another one continues it, and changes nothing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from seamless_verl.errors import JournalError
from seamless_verl.journal.reader import JournalReader
from seamless_verl.journal.schema import TABLES, WAY_OUT, check_version, journal_error, read_only

WHOLE_BYTES = 256 << 20  # up to this size everything is read


def check_file(path: Path) -> None:
    """Reads the journal, as far as seconds allow; an empty file is a new one. No process may write it meanwhile.

    Neither the file nor its folder is changed. Of a large file only the ends of its tables are read, which a cut takes
    away.

    Raises:
        ConfigError: a newer release made it.
        JournalError: it is another program's database, or damaged.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    whole = path.stat().st_size <= WHOLE_BYTES
    if found := _damage(path, whole):
        raise JournalError(str(path), found, WAY_OUT)
    if whole:  # SQLite does not know what its rows mean
        reader = JournalReader(path, unwritten=True)
        reader.restore()
        reader.outside_events()


def _damage(path: Path, whole: bool) -> str:
    """What SQLite finds; nothing where all is well."""
    db = read_only(path, unwritten=True)
    try:
        check_version(db, path)
        if whole:
            rows = db.execute("PRAGMA quick_check(1)").fetchall()
            return next((str(row[0]) for row in rows if row[0] != "ok"), "")
        for table in _tables_of(db):
            db.execute(f"SELECT max(rowid) FROM {table}").fetchall()
        return ""
    except sqlite3.Error as error:
        raise journal_error(path, error) from error
    finally:
        db.close()


def _tables_of(db: sqlite3.Connection) -> list[str]:
    """Those of TABLES that the file has; one of an earlier release lacks the later ones."""
    present = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    return [table for table in TABLES if table in present]
