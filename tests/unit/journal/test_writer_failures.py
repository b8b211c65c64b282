"""A failed disk or file is named in an error for every waiter, and nothing is acknowledged."""

from __future__ import annotations

import asyncio
import pickle
import resource
import sqlite3
import stat
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from fractions import Fraction
from math import nan
from pathlib import Path
from typing import Any

import pytest
from support.journal import call_started, chunk_appended, generated_ids, open_journal, session_opened, write

from seamless_verl.errors import JournalError, JournalOrderError
from seamless_verl.journal import (
    ChunkAppended,
    Event,
    JournalReader,
    RequestRefused,
    RewardPosted,
    SessionClosed,
    SessionOpened,
    SqliteJournal,
    reader,
    validator,
)
from seamless_verl.journal.reader import check_file
from seamless_verl.trajectory.records import TokenChunk


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_fails_all_appends_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    acknowledged = [0] * 8

    async def agent(journal: SqliteJournal, place: int) -> None:
        await journal.append(session_opened(f"s{place}"), call_started(f"s{place}", f"s{place}"))
        while True:
            await journal.append(chunk_appended([1] * 50, f"s{place}"))
            acknowledged[place] += 50

    async def run(journal: SqliteJournal) -> list[BaseException | None]:
        return await asyncio.gather(*(agent(journal, i) for i in range(8)), return_exceptions=True)

    journal = open_journal(tmp_path)
    with files_no_larger_than(300_000):
        ends = await asyncio.wait_for(run(journal), 60)
    assert all(isinstance(end, JournalError) for end in ends) and str(tmp_path) in str(ends[0])
    for _ in range(3):
        with pytest.raises(JournalError, match="open the journal again") as refused:
            journal.submit(chunk_appended([1], "s0"))
        assert len(refused.traceback) < 5, "of one exception for all callers the traceback grows"
    journal.close()
    with open_journal(tmp_path) as again:
        again.check_integrity()
        found = [len(generated_ids(again, f"s{i}")[0]) for i in range(8)]
        write(again, chunk_appended([2], "s0"))
    assert found == acknowledged and min(found) > 0


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"not a database at all" * 500)
    with pytest.raises(JournalError, match="not a database"):
        open_journal(tmp_path)
    with pytest.raises(JournalError, match="not a database"):
        JournalReader(tmp_path / "journal.sqlite").sessions()


def test_another_programs_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db:
        db.execute("CREATE TABLE theirs (x)")
    with pytest.raises(JournalError, match="some other program"):
        open_journal(tmp_path)
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db:
        assert [row[0] for row in db.execute("SELECT name FROM sqlite_master")] == ["theirs"]


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with open_journal(tmp_path) as journal:
        write(
            journal,
            session_opened(),
            call_started(prompt=range(20_000)),
            *(chunk_appended([i] * 100) for i in range(200)),
        )
    whole = path.read_bytes()
    path.write_bytes(whole[:8192] + b"\xff" * (len(whole) - 8192))
    with pytest.raises(JournalError, match="malformed"):
        JournalReader(path).read("s")
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(JournalError, match=r"malformed|full"):
        JournalReader(path).check_integrity()


def test_a_missing_file_and_a_folder_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="unable to open"):
        JournalReader(tmp_path / "nothing.sqlite").sessions()
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"Exists|NotADirectory"):
        SqliteJournal(tmp_path / "file" / "journal.sqlite")


def test_the_errors_survive_pickling() -> None:
    for error in (JournalError("p", "r", "w"), JournalOrderError("e", "s", "r")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)


def test_arrays_of_other_types_are_refused_and_number_types_of_others_are_taken(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, session_opened(), call_started())
        for wrong in (
            ChunkAppended("c", TokenChunk(array("q", [1]), array("f", [0]), 0, "r")),
            ChunkAppended("c", TokenChunk([1], [0], 0, "r")),
        ):
            with pytest.raises((TypeError, AttributeError)):
                write(journal, wrong)
        write(journal, ChunkAppended("c", TokenChunk(array("i", [1]), array("f", [0]), Fraction(3), "r")))
        assert generated_ids(journal) == [[1]]


@pytest.mark.parametrize(
    "event",
    [
        SessionOpened("t", "\ud800", {}, 1.0),
        SessionOpened("t", "u", {}, nan),
        RewardPosted("s", "\udfff", 1.0),
        RewardPosted("s", "r", nan),
        RewardPosted("s", {}, 1.0),  # type: ignore[arg-type]
        RequestRefused("s", "/", 1 << 63, "", 1.0),
        RequestRefused("s", "/", 400, "m" * 101, 1.0),
        SessionClosed("s", "half a pair \ud800"),
    ],
)
def test_a_value_that_a_row_cannot_hold_is_refused_and_the_writer_goes_on(
    tmp_path: Path, event: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validator, "LONGEST", 100)
    with open_journal(tmp_path) as journal:
        write(journal, session_opened())
        with pytest.raises((ValueError, TypeError, OverflowError)):
            write(journal, event)
        write(journal, RewardPosted("s", "r", 1.0))
        (stored,) = journal.restore()
    assert stored.rewards == {"r": 1.0}


def test_what_people_said_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").touch(0o666)  # as `touch` makes it
    with open_journal(tmp_path) as journal:
        write(journal, session_opened())
        modes = {stat.S_IMODE(one.stat().st_mode) for one in tmp_path.glob("journal.sqlite*") if "lock" not in one.name}
    assert modes == {0o600}


@pytest.mark.parametrize("damage", ["cut", "holes"])
def test_a_damaged_journal_is_found_before_a_run_and_not_changed(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "journal.sqlite"
    with open_journal(tmp_path) as journal:
        write(journal, *(session_opened(f"session-{number}") for number in range(400)))
    check_file(path)
    whole = path.read_bytes()
    assert len(whole) > 6 * 4096
    damaged = whole[: len(whole) // 2] if damage == "cut" else whole[:4096] + bytes(4096) * 3 + whole[4 * 4096 :]
    path.write_bytes(damaged)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(JournalError, match=r"journal\.sqlite"):
        check_file(path)
    assert path.read_bytes() == damaged and sorted(tmp_path.iterdir()) == before


def test_a_row_that_belongs_to_nothing_is_found_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.sqlite"
    with open_journal(tmp_path) as journal:
        write(journal, session_opened(), call_started(), chunk_appended([1, 2]))
    check_file(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("DELETE FROM sessions")
        db.commit()
    with pytest.raises(JournalError, match="1 calls of no session"):
        check_file(path)
    monkeypatch.setattr(reader, "WHOLE_BYTES", 0)
    check_file(path)  # it would take minutes to read all of a large one


def test_what_is_checked_gets_no_file_beside_it(tmp_path: Path) -> None:
    """Neither a journal nor another program's database, which has a log of its own too."""
    open_journal(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "theirs.sqlite")) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE theirs (x)")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    check_file(tmp_path / "journal.sqlite")
    with pytest.raises(JournalError, match="some other program"):
        check_file(tmp_path / "theirs.sqlite")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_log_of_a_writer_that_was_killed_is_checked_too(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    killed.mkdir()
    with open_journal(tmp_path) as journal:
        write(journal, *(session_opened(f"s{number}") for number in range(400)))
        for file in tmp_path.glob("journal.sqlite*"):
            (killed / file.name).write_bytes(file.read_bytes())
    path = killed / "journal.sqlite"
    assert path.with_name("journal.sqlite-wal").stat().st_size > 4096
    check_file(path)
    assert len(JournalReader(path).sessions()) == 400
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE sessions SET settings=x'7b22c6'")
        db.commit()
        with pytest.raises(JournalError, match="a row that cannot be read"):
            check_file(path)


def test_a_reader_meets_no_half_made_journal(tmp_path: Path) -> None:
    """Page by page through what SQLite does, a reader looks for the file that is being made: it is absent or whole."""
    path, met = tmp_path / "journal.sqlite", list[str]()

    def look() -> int:
        try:
            met.append(f"{len(JournalReader(path).sessions())} sessions")
        except JournalError as error:
            met.append("none" if not path.exists() else str(error))
        return 0

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        db = plain(*arguments, **options)
        if "uri" not in options:  # a reader's has one
            db.set_progress_handler(look, 1)
        return db

    plain = sqlite3.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", connect)
        with open_journal(tmp_path):
            pass
    assert set(met) == {"none", "0 sessions"}, met
    assert [one.name for one in tmp_path.iterdir() if one.name.endswith("-new")] == []


def test_the_log_of_a_journal_that_was_deleted_is_not_taken_for_the_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with open_journal(tmp_path) as journal:
        write(journal, session_opened())
        old = Path(f"{path}-wal").read_bytes()
    path.unlink()
    Path(f"{path}-wal").write_bytes(old)
    with open_journal(tmp_path) as journal:
        assert journal.restore() == ()


def test_no_journal_and_an_empty_one_are_new_ones(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    check_file(tmp_path / "empty")
    check_file(tmp_path / "none")
    assert not (tmp_path / "none").exists()
