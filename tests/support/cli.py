"""A journal as a run leaves it, and what the command says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamless_verl.cli.main import main
from seamless_verl.journal import HandedOver, HandOverBegun, RewardPosted, SessionClosed, SqliteJournal
from support.journal import delta, ended, journal_at, opened, started, write

Capture = pytest.CaptureFixture[str]
NOTHING_LEFT_BEHIND = {"journal.sqlite", "journal.sqlite-lock", "journal.sqlite-wal", "journal.sqlite-shm"}


def drifted(journal: SqliteJournal, session_id: str = "aaa1", uid: str = "u0") -> None:
    """Three calls, six generated tokens of versions 0 to 2; the third call rewrites the first one's reply."""
    c1, c2, c3 = (f"{session_id}-c{i}" for i in (1, 2, 3))
    write(journal, opened(session_id, uid), started(session_id, c1))
    write(journal, delta([4, 5], c1), delta([6], c1, version=1), ended(c1))
    write(journal, started(session_id, c2, [1, 2, 3, 4, 5, 6, 7]), delta([8], c2, version=1), ended(c2))
    write(journal, started(session_id, c3, [1, 2, 3, 4, 9]), delta([10, 11], c3, version=2), ended(c3))


def closed(session_id: str, reason: str = "finished", reward: float = 0.1 + 0.2) -> list[RewardPosted | SessionClosed]:
    return [RewardPosted(session_id, "reward", reward), SessionClosed(session_id, reason)]


def filled(journal: SqliteJournal) -> None:
    """One session closed, one open with a call that runs, one failed and handed over."""
    drifted(journal)
    write(journal, *closed("aaa1"))
    write(journal, opened("aab2", "u1"), started("aab2", "aab2-c1"), delta([4], "aab2-c1", version=3))
    write(journal, opened("b3", "u1"), started("b3", "b3-c1"), delta([4, 5], "b3-c1", version=4), ended("b3-c1"))
    write(journal, *closed("b3", "failed"), HandOverBegun("b3"), HandedOver("b3", 9.0))


def journal_file(folder: Path) -> str:
    """The path of a filled journal that nobody writes any longer."""
    with journal_at(folder) as journal:
        filled(journal)
        return str(journal.path)


def said(capsys: Capture, *argv: str) -> list[str]:
    """The lines of `trajectories ...`, which succeeds and says nothing on stderr."""
    assert main(["trajectories", *argv]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    return out.out.splitlines()


def refusal(capsys: Capture, *argv: str) -> str:
    """The line that is told; nothing is said on stdout."""
    try:
        code = main(["trajectories", *argv])
    except SystemExit as stop:
        code = int(str(stop.code))
    out = capsys.readouterr()
    assert code == 2 and out.out == ""
    (line,) = out.err.splitlines()
    return line
