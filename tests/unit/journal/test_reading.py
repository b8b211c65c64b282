"""A journal on storage that is read-only: SQLite's files for readers cannot be made there."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from support.cli import fill_journal
from support.journal import open_journal

from seamless_verl.journal import JournalReader
from seamless_verl.journal.schema import read_only


@pytest.fixture
def unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so that the answer is made up."""
    monkeypatch.setattr(os, "access", lambda place, mode: False)


@pytest.mark.usefixtures("unwritable")
def test_a_journal_that_was_closed_is_read_without_files_beside_it(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        fill_journal(journal)
        ids = [summary.session_id for summary in journal.sessions()]
    (link := tmp_path / "link").symlink_to(journal.path)
    before = set(tmp_path.iterdir())
    for path in (journal.path, link):
        with closing(read_only(path)) as db:
            assert db.execute("SELECT session_id FROM sessions ORDER BY n").fetchall() == [(one,) for one in ids]
            assert set(tmp_path.iterdir()) == before
        assert [one.session_id for one in JournalReader(path).sessions()] == ids


@pytest.mark.usefixtures("unwritable")
def test_what_only_the_log_has_is_read_too(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        fill_journal(journal)
        (link := tmp_path / "link").symlink_to(journal.path)
        for path in (journal.path, link):
            for unwritten in (False, True):
                reader = JournalReader(path, unwritten=unwritten)
                assert len(reader.sessions()) == len(journal.sessions())
