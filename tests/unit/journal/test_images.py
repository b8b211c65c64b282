"""The journal keeps an image once, however many calls and sessions have it, and as long as one of them is on record."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from support.journal import call_started, chunk_appended, open_journal, session_opened, write

from seamless_verl.errors import JournalOrderError
from seamless_verl.journal import HandedOver, HandOverBegun, ImageAdded, SessionClosed
from seamless_verl.journal.stored import rebuild_record

RED, BLUE = "a" * 64, "b" * 64


def stored(folder: Path) -> list[tuple[str, bytes]]:
    db = sqlite3.connect(folder / "journal.sqlite")
    try:
        return db.execute("SELECT digest, data FROM images ORDER BY digest").fetchall()
    finally:
        db.close()


def test_an_image_of_many_calls_and_sessions_is_stored_once(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        for name in ("s", "t"):
            write(journal, session_opened(name, name))
            for call in (f"{name}1", f"{name}2"):
                write(journal, ImageAdded(name, RED, b"red"), call_started(name, call), chunk_appended([1], call))
        write(journal, ImageAdded("t", BLUE, b"blue"))
        read = journal.read("t")
        assert read is not None and rebuild_record(read, all_calls=True).images == {RED: b"red", BLUE: b"blue"}
    assert stored(tmp_path) == [(RED, b"red"), (BLUE, b"blue")]
    with open_journal(tmp_path) as journal:  # which does not know any more what it has stored
        write(journal, ImageAdded("s", RED, b"red"))
        assert [dict(one.images) for one in journal.restore()] == [{RED: b"red"}, {RED: b"red", BLUE: b"blue"}]
        journal.check_integrity()
    assert len(stored(tmp_path)) == 2


def test_an_image_is_deleted_with_the_last_session_that_has_it(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        for at, name in enumerate(("s", "t")):
            write(journal, session_opened(name, name), ImageAdded(name, RED, b"red"))
            write(journal, SessionClosed(name, "finished"), HandOverBegun(name), HandedOver(name, float(at), {}))
        for before, left in ((0.5, 1), (1.5, 0)):
            asyncio.run(compacted(journal, before))
            assert len(stored(tmp_path)) == left
            journal.check_integrity()


async def compacted(journal: object, before: float) -> None:
    await journal.compact(before)  # type: ignore[attr-defined]


def test_a_refused_append_leaves_no_image(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, session_opened())
        with pytest.raises(JournalOrderError):
            write(journal, ImageAdded("s", RED, b"red"), chunk_appended([1], "no such call"))
        write(journal, ImageAdded("s", RED, b"red"))
        read = journal.read("s")
        assert read is not None and read.images == {RED: b"red"}
