"""Opens a journal for reading, and finds a session by its id."""

from __future__ import annotations

from pathlib import Path

from seamless_verl.errors import ConfigError, JournalError
from seamless_verl.journal import JournalReader, StoredSession

JOURNAL_FILE = "trajectories.sqlite"
WAY_OUT = f"Give the file that a run writes: {JOURNAL_FILE} beside its checkpoints, or seamless.gateway.journal"
NO_GATEWAY = f"{WAY_OUT}. A run without seamless.gateway.enabled=true has none"
MAX_LISTED = 5  # sessions or journals named in an error message


def open_journal(path: Path) -> JournalReader:
    """Raises ConfigError if there is no journal at `path`, or a newer release made it."""
    if path.is_dir():
        raise ConfigError("JOURNAL", str(path), "it is a folder, and a journal is one file", _list_journals(path))
    if not path.is_file():
        raise ConfigError("JOURNAL", str(path), "there is no such file", NO_GATEWAY)
    reader = JournalReader(path)
    try:
        reader.stage("")
    except JournalError as error:
        raise ConfigError("JOURNAL", str(path), f"it cannot be read as a journal ({error.reason})", WAY_OUT) from error
    return reader


def _list_journals(folder: Path) -> str:
    """The journals in the folder or in its subfolders, by their usual name, as the way out of an error."""
    journals = sorted(map(str, [*folder.glob(JOURNAL_FILE), *folder.glob(f"*/{JOURNAL_FILE}")]))
    return f"There is {_list_some(journals)}" if journals else NO_GATEWAY


def _list_some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}"


def find_session(reader: JournalReader, prefix: str) -> StoredSession:
    """The session whose id is `prefix`, or the only one whose id begins with it; raises ConfigError otherwise."""
    exact = reader.read(prefix)
    if exact is not None:
        return exact
    ids = [summary.session_id for summary in reader.sessions() if summary.session_id.startswith(prefix)]
    if len(ids) > 1:
        raise ConfigError("SESSION", prefix, f"{len(ids)} sessions begin so", f"Give more of the id: {_list_some(ids)}")
    session = reader.read(ids[0]) if ids else None
    if session is None:
        way_out = f"`seamless-verl trajectories ls {reader.path}` lists those there are"
        raise ConfigError("SESSION", prefix, "no session's id is this or begins so", way_out)
    return session
