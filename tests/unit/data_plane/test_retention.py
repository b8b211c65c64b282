"""What a journal keeps is bounded beside the run: nobody waits for a deletion, and two never run at once."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest
from support.journal import call_ended, call_started, chunk_appended, open_journal, session_opened, write

from seamless_verl.data_plane.finished_sessions import DAY_S, GIB, Retention
from seamless_verl.errors import JournalError
from seamless_verl.journal import HandedOver, HandOverBegun, SessionClosed, SqliteJournal


def hand_over(journal: SqliteJournal, name: str, at: float) -> None:
    write(journal, session_opened(name), call_started(name, name, range(1000)), chunk_appended(range(1000), name))
    write(journal, call_ended(name), SessionClosed(name, "finished"), HandOverBegun(name), HandedOver(name, at))


async def checked(kept: Retention) -> None:
    kept.check()
    assert kept.task is not None
    await kept.task


def names(journal: SqliteJournal) -> list[str]:
    return [session.session_id for session in journal.sessions()]


async def test_old_sessions_are_deleted_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = time.time()
    with open_journal(tmp_path) as journal:
        for name, days in (("older", 3.0), ("old", 2.0), ("young", 0.5)):
            hand_over(journal, name, now - days * DAY_S)
        write(journal, session_opened("open"))
        unbounded = Retention(journal, None, None)
        await checked(unbounded)
        assert names(journal) == ["older", "old", "young", "open"]
        kept = Retention(journal, 1.0, None)
        await checked(kept)
        assert names(journal) == ["young", "open"] and kept.metrics()["journal/deleted"] == 0, "not looked at yet"
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                await checked(kept)
        assert kept.metrics() == {"journal/bytes": float(kept.used_bytes), "journal/deleted": 2.0}
        assert caplog.text.count("or 1.0 days old") == 1, "it is said once"


async def test_a_clock_that_jumps_makes_no_session_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_journal(tmp_path) as journal:
        kept, jump_s = Retention(journal, 7.0, None), 0.0
        monkeypatch.setattr(time, "time", lambda real=time.time: real() + jump_s)
        for name, days in (("old", 8.0), ("young", 6.0)):
            hand_over(journal, name, time.time() - days * DAY_S)
        jump_s = 3 * DAY_S
        hand_over(journal, "after", time.time())
        await checked(kept)
        assert names(journal) == ["young", "after"]
        jump_s = -3 * DAY_S
        await checked(kept)
        assert names(journal) == ["young", "after"]


async def test_a_journal_that_is_too_large_loses_its_oldest(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        for number in range(20):
            hand_over(journal, f"s{number}", float(number))
        kept = Retention(journal, None, 130_000 / GIB)
        for _ in range(2):
            await checked(kept)
        left = names(journal)
        assert 0 < len(left) < 20 and left == [f"s{number}" for number in range(20 - len(left), 20)]
        assert kept.metrics()["journal/bytes"] <= 130_000


async def test_one_deletion_runs_at_a_time_and_ends_with_the_journal(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    kept = Retention(journal, None, None)
    kept.check()
    first = kept.task
    kept.check()
    assert kept.task is first, "a second one began beside it"
    await asyncio.to_thread(journal.close)
    await kept.end()
    kept = Retention(journal, None, None)
    with pytest.raises(JournalError, match="closed"):
        await checked(kept)
    with pytest.raises(JournalError, match="closed"):
        kept.check()
    await kept.end()
