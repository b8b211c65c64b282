"""A journal as a run leaves it, and the output of the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamless_verl.cli.main import main
from seamless_verl.journal import HandedOver, HandOverBegun, RewardPosted, SessionClosed, SqliteJournal
from support.journal import call_ended, call_started, chunk_appended, open_journal, session_opened, write

Capture = pytest.CaptureFixture[str]
NOTHING_LEFT_BEHIND = {"journal.sqlite", "journal.sqlite-lock", "journal.sqlite-wal", "journal.sqlite-shm"}


def write_drifted_session(journal: SqliteJournal, session_id: str = "aaa1", uid: str = "u0") -> None:
    """Three calls, six generated tokens of versions 0 to 2; the third call rewrites the first one's reply."""
    c1, c2, c3 = (f"{session_id}-c{i}" for i in (1, 2, 3))
    write(journal, session_opened(session_id, uid), call_started(session_id, c1))
    write(journal, chunk_appended([4, 5], c1), chunk_appended([6], c1, version=1), call_ended(c1))
    write(
        journal, call_started(session_id, c2, [1, 2, 3, 4, 5, 6, 7]), chunk_appended([8], c2, version=1), call_ended(c2)
    )
    write(
        journal, call_started(session_id, c3, [1, 2, 3, 4, 9]), chunk_appended([10, 11], c3, version=2), call_ended(c3)
    )


def close_events(
    session_id: str, reason: str = "finished", reward: float = 0.1 + 0.2
) -> list[RewardPosted | SessionClosed]:
    return [RewardPosted(session_id, "reward", reward), SessionClosed(session_id, reason)]


def fill_journal(journal: SqliteJournal) -> None:
    """One session closed, one open with a call that runs, one failed and handed over."""
    write_drifted_session(journal)
    write(journal, *close_events("aaa1"))
    write(
        journal,
        session_opened("aab2", "u1"),
        call_started("aab2", "aab2-c1"),
        chunk_appended([4], "aab2-c1", version=3),
    )
    write(
        journal,
        session_opened("b3", "u1"),
        call_started("b3", "b3-c1"),
        chunk_appended([4, 5], "b3-c1", version=4),
        call_ended("b3-c1"),
    )
    write(journal, *close_events("b3", "failed"), HandOverBegun("b3"), HandedOver("b3", 9.0))


def journal_file(folder: Path) -> str:
    """The path of a filled journal without a writer."""
    with open_journal(folder) as journal:
        fill_journal(journal)
        return str(journal.path)


def output_lines(capsys: Capture, *argv: str) -> list[str]:
    """The lines that `trajectories ...` prints; it succeeds and prints nothing on stderr."""
    assert main(["trajectories", *argv]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    return out.out.splitlines()


def error_line(capsys: Capture, *argv: str) -> str:
    """The line that a refused `trajectories ...` prints on stderr; it prints nothing on stdout."""
    try:
        code = main(["trajectories", *argv])
    except SystemExit as stop:
        code = int(str(stop.code))
    out = capsys.readouterr()
    assert code == 2 and out.out == ""
    (line,) = out.err.splitlines()
    return line
