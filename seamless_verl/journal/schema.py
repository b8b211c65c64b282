"""The journal's file: its tables, how it is opened, and how values are stored in it.

Rows are only inserted, and deleted by compaction; nothing on record is changed. `n` numbers follow the order of
events. A call's prompt is the first `base_len` bytes of its base call's prompt and generated ids, then `suffix`.
Its request is stored likewise, relative to the base call's request. Arrays are little endian; dicts are UTF-8 JSON.
Table `deltas` holds the chunks of generated tokens, `endings` the ends of calls, `refused` the requests that got an
error, `group_outcomes` what became of the groups that were handed over. `note` of a stage is the reason of a close, and
JSON for the stages of a hand-over. `grammar` has a byte for each token of a chunk in which some were sampled under a
grammar, else NULL.

The tables of LATER are made with their first row. `routes`, where engines return routes, has them packed: those of a
chunk's tokens, and those of its call's prompt beside the call's first. `images` has each file once, by its sha256, and
`image_uses` which sessions have it: with the last of them it is deleted.

A file has one version of this format; one of another is refused.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from seamless_verl.errors import ConfigError, JournalError
from seamless_verl.runtime.locks import only_writer
from seamless_verl.trajectory.records import LOGPROB, TOKEN

VERSION = 2
APPLICATION_ID = 0x53454A4C  # "SEJL"
# The order of insertion within a transaction; values are in the order of columns.
TABLES = {
    "sessions": "n INTEGER PRIMARY KEY, session_id TEXT UNIQUE, uid TEXT, settings BLOB, opened_at REAL",
    "calls": "n INTEGER PRIMARY KEY, session INTEGER, call_id TEXT, digest TEXT, base INTEGER, base_len INTEGER,"
    " request_base INTEGER, request_len INTEGER, suffix BLOB, request BLOB",
    "replicas": "n INTEGER PRIMARY KEY, name TEXT",
    "deltas": "n INTEGER PRIMARY KEY, call INTEGER, version INTEGER, replica INTEGER, ids BLOB, logprobs BLOB,"
    " grammar BLOB",
    "endings": "call INTEGER PRIMARY KEY, finish TEXT, reply BLOB",
    "rewards": "n INTEGER PRIMARY KEY, session INTEGER, name TEXT, value REAL",
    "refused": "n INTEGER PRIMARY KEY, session INTEGER, path TEXT, status INTEGER, message TEXT, at REAL",
    "stages": "session INTEGER, stage INTEGER, note TEXT, at REAL, PRIMARY KEY (session, stage)",
    "outside_events": "n INTEGER PRIMARY KEY, kind TEXT, subject TEXT, detail BLOB, at REAL",
    "group_outcomes": "n INTEGER PRIMARY KEY, uid TEXT, outcome TEXT, step INTEGER, details BLOB, at REAL",
}
INDEXES = {
    "sessions": "uid",
    "group_outcomes": "uid",
    "calls": "session",
    "deltas": "call",
    "rewards": "session",
    "refused": "session",
    "stages": "stage, at",
    "outside_events": "subject, kind",
}

ROUTES, IMAGES, IMAGE_USES = "routes", "images", "image_uses"
LATER = {
    ROUTES: (
        "CREATE TABLE IF NOT EXISTS routes"
        " (delta INTEGER PRIMARY KEY, session INTEGER, of_tokens BLOB, of_prompt BLOB)",
        "CREATE INDEX IF NOT EXISTS routes_by ON routes (session)",
    ),
    IMAGES: ("CREATE TABLE IF NOT EXISTS images (digest TEXT PRIMARY KEY, data BLOB)",),
    IMAGE_USES: (
        "CREATE TABLE IF NOT EXISTS image_uses (session INTEGER, digest TEXT, PRIMARY KEY (session, digest))",
        "CREATE INDEX IF NOT EXISTS image_uses_by ON image_uses (digest)",
    ),
}
REPEATED = (IMAGES, IMAGE_USES)  # Tables of which a row that is there already is left as it is

PRIVATE = 0o600  # the mode of a new file; SQLite gives its log the same
PAGE_BYTES = 4096  # measured no slower than 8192 and 16384, and a commit writes whole pages
CHECKPOINT_PAGES = 8000  # of log, 32 MB, before they move into the file: that flushes the disk and delays appends
GROWING_KEYS = ("messages", "input")  # a conversation grows at its end; stored last, so that requests share a prefix
CALL_KEYS = ("gateway",)  # differ in every call, so they are stored after all other keys
WAY_OUT = "Free the disk or replace the file, then open the journal again; only what was acknowledged is in it"


@contextmanager
def open_for_writing(path: Path) -> Iterator[sqlite3.Connection]:
    """The only connection that writes; transactions are explicit. It is made and used in one thread.

    Raises:
        ConfigError: another process writes this journal, or it has another version.
        JournalError: the file cannot be opened as a journal.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(only_writer(path))
        except BlockingIOError as error:
            way_out = "Stop the other writer, or give this one its own path"
            raise ConfigError("journal", str(path), "another journal writes to it", way_out) from error
        except OSError as error:
            raise JournalError(str(path), f"{type(error).__name__}: {error}", WAY_OUT) from error
        if not path.exists() or path.stat().st_size == 0:
            _create(path)
        db = sqlite3.connect(path, isolation_level=None, cached_statements=256)
        try:
            check_version(db, path)  # before anything is changed
            _set_up(db)
            yield db
        except sqlite3.Error as error:
            raise journal_error(path, error) from error
        finally:
            db.close()


def _create(path: Path) -> None:
    """Puts an empty journal at `path`, whole at once: a reader that comes meanwhile finds no file, never half of one.

    It will hold what people said, so only its owner may read it. The mode of an older file is its owner's choice.
    """
    new, beside = Path(f"{path}-new"), [Path(f"{path}{end}") for end in ("-wal", "-shm", "-journal")]
    try:
        new.unlink(missing_ok=True)  # of a process that was killed here
        os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE))
        db = sqlite3.connect(new, isolation_level=None)
        try:
            db.execute(f"PRAGMA page_size={PAGE_BYTES}")
            db.execute("PRAGMA auto_vacuum=INCREMENTAL")
            _set_up(db)
            tables = [f"CREATE TABLE {table} ({columns});" for table, columns in TABLES.items()]
            indexes = [f"CREATE INDEX {table}_by ON {table} ({columns});" for table, columns in INDEXES.items()]
            names = f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={VERSION};"
            db.executescript("\n".join(["BEGIN;", *tables, *indexes, names, "COMMIT;"]))
        finally:
            db.close()
        for old in beside:  # the log of a file that is gone; SQLite would take it for this one's
            old.unlink(missing_ok=True)
        new.replace(path)
    except sqlite3.Error as error:
        raise journal_error(path, error) from error
    except OSError as error:
        raise JournalError(str(path), f"{type(error).__name__}: {error}", WAY_OUT) from error


def read_only(path: Path, *, unwritten: bool = False) -> sqlite3.Connection:
    """A connection that cannot change the file.

    Where no process writes it (`unwritten`), it leaves no file beside it either: SQLite makes two for readers, unless
    it is told that the file cannot change. It cannot where there is no log of a writer that was killed. The same holds
    where the files cannot be made, as on storage that is read-only, and there is no log: a writer has one all the time.
    """
    log = Path(f"{os.path.realpath(path)}-wal")
    length = log.stat().st_size if log.exists() else None
    complete = not length if unwritten else length is None and not os.access(log.parent, os.W_OK)
    options = "mode=ro&immutable=1" if complete else "mode=ro"
    return sqlite3.connect(f"file:{quote(str(path))}?{options}", uri=True, isolation_level=None)


def _set_up(db: sqlite3.Connection) -> None:
    """Sets how this connection writes."""
    limit = f"journal_size_limit={2 * CHECKPOINT_PAGES * PAGE_BYTES}"
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"wal_autocheckpoint={CHECKPOINT_PAGES}", limit):
        db.execute(f"PRAGMA {pragma}")


def check_version(db: sqlite3.Connection, path: Path) -> None:
    """Raises JournalError if the file is not a journal, and ConfigError if it has another version."""
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise JournalError(str(path), "it is some other program's database", "Give the journal a path of its own")
    if (version := db.execute("PRAGMA user_version").fetchone()[0]) != VERSION:
        way_out = "Use the release that wrote it, or a new path"
        raise ConfigError("journal", str(path), f"its format is {version}, this release knows {VERSION}", way_out)


def has_table(db: sqlite3.Connection, name: str) -> bool:
    """Whether it has this table of LATER."""
    return db.execute("SELECT 1 FROM sqlite_master WHERE type='table' AND name=?", (name,)).fetchone() is not None


def journal_error(path: Path, error: sqlite3.Error) -> JournalError:
    """An error of SQLite as an error of the journal."""
    return JournalError(str(path), f"{type(error).__name__}: {error}", WAY_OUT)


def pack(values: array[Any]) -> bytes:
    """The array's elements, 4 bytes each; raises TypeError: they are neither int32 nor float32."""
    if values.typecode not in (TOKEN, LOGPROB):
        raise TypeError(f"an array of '{values.typecode}' is neither token ids nor logprobs; make it with records")
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def unpack(typecode: str, data: bytes) -> array[Any]:
    """Token ids (TOKEN, int32), or log-probabilities (LOGPROB, float32)."""
    values: array[Any] = array(typecode, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def to_json(value: dict[str, Any]) -> bytes:
    """Compact JSON; the growing keys are last, followed only by the keys that differ in every call."""
    if any(key in value for key in GROWING_KEYS):
        value = dict(sorted(value.items(), key=lambda item: (item[0] in CALL_KEYS, item[0] in GROWING_KEYS)))
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def from_json(data: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(data.decode("utf-8", "surrogatepass"))
    return value
