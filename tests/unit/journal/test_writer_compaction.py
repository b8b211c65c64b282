"""What compaction may delete."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest
from support.journal import call_ended, call_started, chunk_appended, generated_ids, open_journal, session_opened, write
from support.routes import marks, rows_of

from seamless_verl.journal import (
    BEGUN,
    LEASED,
    RUN,
    UNDONE,
    ChunkAppended,
    HandedOver,
    HandOverBegun,
    OutsideEvent,
    SessionClosed,
    SqliteJournal,
    Stage,
)
from seamless_verl.journal.schema import INDEXES, PAGE_BYTES, TABLES
from seamless_verl.journal.writer import DELETED_AT_ONCE, compact_step
from seamless_verl.trajectory.records import TokenChunk, logprobs, tokens

EMPTY_PAGES = len(TABLES) + len(INDEXES) + 4  # one for each, and for SQLite's own


async def test_compaction_deletes_only_what_was_handed_over_and_the_file_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with open_journal(tmp_path) as journal:
        for i in range(20):
            name = f"s{i}"
            write(
                journal,
                session_opened(name),
                call_started(name, name, range(5000)),
                chunk_appended(range(5000), name),
                call_ended(name),
            )
            if i < 15:
                write(journal, SessionClosed(name, "done"))
            if i < 10:
                write(journal, HandOverBegun(name), HandedOver(name, float(i)))
        done = await journal.compact(4.0)
        assert done.sessions == 4 and journal.sessions()[0].session_id == "s4"
        done = await journal.compact(4.0, max_bytes=done.used_bytes - 100_000)
        assert done.sessions == 2
        done = await journal.compact(4.0, max_bytes=0)
        assert done.sessions == 4
        assert [session.stage for session in journal.sessions()] == [Stage.CLOSED] * 5 + [Stage.OPEN] * 5
        assert path.stat().st_size == done.used_bytes < 10 * 65_000 + PAGE_BYTES * EMPTY_PAGES
        assert generated_ids(journal, "s12") == [[*range(5000)]]
        journal.check_integrity()


class AppendsWithoutPause:
    """Each append is followed by the next one, in the writer's own thread, until one session is left."""

    def __init__(self, journal: SqliteJournal) -> None:
        self.journal = journal
        self.sessions_left: list[int] = []  # in the journal, when each append was acknowledged
        self.ended = threading.Event()

    def go_on(self) -> None:
        written = self.journal.submit(chunk_appended([len(self.sessions_left)], "live"))
        written.add_done_callback(self._acknowledged)

    def _acknowledged(self, written: Future[None]) -> None:
        self.sessions_left.append(len(self.journal.sessions()))
        if written.exception() is not None or self.sessions_left[-1] == 1:
            self.ended.set()
        else:
            self.go_on()


async def test_agents_go_on_while_the_journal_is_compacted(tmp_path: Path) -> None:
    """An append waits for one step of it at most: between two steps, those that wait are written."""
    with open_journal(tmp_path) as journal:
        for name in map(str, range(200)):
            write(
                journal,
                session_opened(name),
                call_started(name, name),
                chunk_appended([1], name),
                SessionClosed(name, "done"),
            )
            write(journal, HandOverBegun(name), HandedOver(name, 0.0))
        write(journal, session_opened("live"), call_started("live", "live"))
        appends = AppendsWithoutPause(journal)
        appends.go_on()
        assert (await journal.compact(1.0)).sessions == 200
        assert await asyncio.to_thread(appends.ended.wait, 30)
        assert sorted({*appends.sessions_left}, reverse=True) == [*range(201, 1, -DELETED_AT_ONCE), 1]
        assert generated_ids(journal, "live") == [[*range(len(appends.sessions_left))]]


def with_routes(journal: SqliteJournal, name: str, *, handed: float | None) -> None:
    """A session whose one call has many tokens with their routes."""
    ids = [*range(200)] * 25
    chunk = TokenChunk(tokens(ids), logprobs([0.0] * len(ids)), 0, routes=rows_of(*ids), prompt_routes=rows_of(2, 3))
    write(journal, session_opened(name), call_started(name, name), ChunkAppended(name, chunk), call_ended(name))
    if handed is not None:
        write(journal, SessionClosed(name, "done"), HandOverBegun(name), HandedOver(name, handed))


def routed(journal: SqliteJournal) -> list[str]:
    """The sessions whose call has its routes, all of them."""
    found = []
    for summary in journal.sessions():
        stored = journal.read(summary.session_id)
        assert stored is not None
        (call,) = stored.calls
        (segment,) = call.segments
        assert (segment.routes is None) == (call.prompt_routes is None)
        if segment.routes is not None:
            assert marks(segment.routes) == list(segment.ids) and marks(call.prompt_routes) == [2, 3]
            found.append(stored.session_id)
    return found


async def test_routes_go_first_where_the_file_is_too_large_and_no_session_that_may_need_them_loses_them(
    tmp_path: Path,
) -> None:
    with open_journal(tmp_path) as journal:
        for number, name in enumerate(("old", "needed", "new")):
            with_routes(journal, name, handed=float(number))
        with_routes(journal, "open", handed=None)
        whole = await journal.compact(0.0)
        assert routed(journal) == ["old", "needed", "new", "open"]
        done = await journal.compact(0.0, whole.used_bytes - 10_000, keep={"needed"})
        assert routed(journal) == ["needed", "new", "open"] and done.sessions == 0
        done = await journal.compact(0.0, whole.used_bytes - 40_000, keep={"needed"})
        assert routed(journal) == ["needed", "open"] and done.sessions == 0
        assert len(journal.sessions()) == 4, "their tokens are still there"
        done = await journal.compact(2.0, keep={"needed"})
        assert done.sessions == 1
        journal.check_integrity()
    with open_journal(tmp_path) as journal:
        assert routed(journal) == ["needed", "open"], "as before the restart"


def lease(journal: SqliteJournal, name: str, *, session: str, at: float) -> None:
    """The begin and the result of a lease."""
    write(journal, OutsideEvent(LEASED, name, {"task": f"t {name}", "session": session}, at))
    write(journal, OutsideEvent("done", name, {"task": f"t {name}", "outcome": {"text": "x" * 300}}, at))


def hand_over(journal: SqliteJournal, name: str, at: float) -> None:
    write(journal, SessionClosed(name, "done"), HandOverBegun(name), HandedOver(name, at, {"kept": True}))


@pytest.mark.parametrize(("before", "max_bytes"), [(100.0, None), (0.0, 110_000)])
async def test_leases_leave_as_sessions_do_and_what_a_restart_needs_stays(
    tmp_path: Path, before: float, max_bytes: int | None
) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, OutsideEvent(BEGUN, "", {}, 1.0), session_opened("live"), session_opened("undone"))
        lease(journal, "of an earlier start", session="live", at=2.0)
        write(journal, OutsideEvent(BEGUN, "", {}, 3.0), OutsideEvent(RUN, "run", {"version": 1}, 3.0))
        lease(journal, "live", session="live", at=4.0)
        for number in range(300):
            write(journal, session_opened(f"s{number}"))
            lease(journal, f"l{number}", session=f"s{number}", at=5.0)
            hand_over(journal, f"s{number}", 150.0)
        hand_over(journal, "undone", 160.0)
        write(journal, OutsideEvent(UNDONE, "undone", {}, 6.0), OutsideEvent(UNDONE, "deleted", {}, 6.0))
        write(journal, OutsideEvent("refused", "an address", {}, 7.0), OutsideEvent("refused", "live", {}, 200.0))
        assert [one.subject for one in journal.open_leases()] == ["live", "live", "live"]
        used = (await journal.compact(0.0)).used_bytes
        assert used > 200_000 and len(journal.outside_events()) == 611
        used = (await journal.compact(before, max_bytes)).used_bytes
        assert used <= (max_bytes or 200_000)
        left = [(event.kind, event.subject) for event in journal.outside_events()]
        kept = [(BEGUN, ""), (BEGUN, ""), (RUN, "run"), (LEASED, "live"), ("done", "live"), (UNDONE, "undone")]
        assert left == [*kept, ("refused", "live")]
        assert {"live", "undone"} <= {session.session_id for session in journal.sessions()}
        hand_over(journal, "live", 300.0)
        assert journal.open_leases() == ()
        await journal.compact(0.0, 0)
        assert {event.kind for event in journal.outside_events()} == {BEGUN, RUN, UNDONE}
        await journal.compact(0.0, 0)
        assert not journal.sessions() and {event.kind for event in journal.outside_events()} == {BEGUN, RUN}


async def test_sessions_that_are_needed_stay_however_large_and_old(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        for number in range(DELETED_AT_ONCE * 2):
            write(journal, session_opened(f"s{number}"))
            hand_over(journal, f"s{number}", float(number))
        needed = {f"s{number}" for number in range(0, DELETED_AT_ONCE * 2, 2)}
        assert (await journal.compact(1000.0, 0, needed)).sessions == DELETED_AT_ONCE
        assert {session.session_id for session in journal.sessions()} == needed


def test_freed_pages_are_given_back_many_at_once(tmp_path: Path) -> None:
    """`Connection.execute` ends an incremental vacuum after its first page, and a flush of the disk follows each."""
    with closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA auto_vacuum=INCREMENTAL")
        for table, columns in TABLES.items():
            db.execute(f"CREATE TABLE {table} ({columns})")
        db.execute("CREATE TABLE filler (text)")
        db.executemany("INSERT INTO filler VALUES (?)", [("x" * 4000,)] * 500)
        db.execute("DELETE FROM filler")
        assert db.execute("PRAGMA freelist_count").fetchone()[0] > 400
        assert compact_step(db, 0.0, None) == (0, False)
        assert db.execute("PRAGMA freelist_count").fetchone()[0] == 0
