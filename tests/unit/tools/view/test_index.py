"""The index has what the reader has, whenever it is brought up to date, and forgets what was deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli import close_events, fill_journal, write_drifted_session
from support.journal import call_started, chunk_appended, open_journal, session_opened, write

from seamless_verl.errors import JournalError
from seamless_verl.journal import (
    UNDONE,
    GroupDecided,
    GroupOutcome,
    HandedOver,
    HandOverBegun,
    OutsideEvent,
    SessionClosed,
    SqliteJournal,
)
from seamless_verl.tools.trajectories.recorded import recorded
from seamless_verl.tools.view import index as module
from seamless_verl.tools.view.index import JournalIndex, SessionEntry, sums_of
from seamless_verl.trajectory.records import logprobs


def check_same(index: JournalIndex, journal: SqliteJournal) -> list[SessionEntry]:
    """The index against the summaries, and against each session as it is read whole."""
    index.refresh()
    entries = list(index.entries())
    summaries = journal.sessions()
    assert [one.session_id for one in entries] == [one.session_id for one in summaries]
    for entry, summary in zip(entries, summaries, strict=True):
        for name in ("uid", "stage", "opened_at", "calls", "tokens", "reason", "outcome"):
            assert getattr(entry, name) == getattr(summary, name), name
        check_entry(entry, journal)
    return entries


def check_entry(entry: SessionEntry, journal: SqliteJournal) -> None:
    stored = journal.read(entry.session_id)
    assert stored is not None
    segments = [segment for call in stored.calls for segment in call.segments]
    values = [value for segment in segments for value in segment.logprobs]
    assert entry.mean_logprob == (pytest.approx(np.mean(values), abs=1e-6) if values else None)
    versions = [segment.version for segment in segments]
    assert entry.versions == ((min(versions), max(versions)) if versions else None)
    assert set(entry.replicas) == {segment.replica for segment in segments}
    assert entry.rewards == stored.rewards and entry.validation == stored.validation
    dropped = recorded(stored).dropped
    assert entry.dropped == (None if dropped is None else str(dropped))


def test_it_has_what_the_journal_has_after_each_event(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        index = JournalIndex(journal.path)
        check_same(index, journal)
        fill_journal(journal)
        check_same(index, journal)
        write(journal, chunk_appended([5, 6], "aab2-c1", version=4, replica="r1"))
        (_, running, _) = check_same(index, journal)
        assert running.replicas == ("r0", "r1") and running.versions == (3, 4)
        write(journal, *close_events("aab2", "timed_out"), HandOverBegun("aab2"))
        check_same(index, journal)
        write(journal, HandedOver("aab2", 3.0, {"kept": False, "dropped": "timed_out", "rewards": {"late": 2.0}}))
        (_, dropped, _) = check_same(index, journal)
        assert dropped.dropped == "timed_out" and dropped.rewards["late"] == 2.0
        write(journal, HandOverBegun("aaa1"), HandedOver("aaa1", 4.0, {"kept": True}))
        write(journal, GroupDecided("u0", GroupOutcome.TRAINED, 7, {}))
        assert check_same(index, journal)[0].outcome == "step 7"
        write(journal, GroupDecided("u0", GroupOutcome.STALE, 8, {}))
        assert check_same(index, journal)[0].dropped == "group"
        write(journal, GroupDecided("u0", GroupOutcome.DEFERRED, 9, {}))
        assert check_same(index, journal)[0].dropped == "deferred"
        write(journal, GroupDecided("u0", GroupOutcome.UNDONE, 9, {}))
        assert (check_same(index, journal)[0].outcome, check_same(index, journal)[0].dropped) == ("queued", None)
        write(journal, GroupDecided("u0", GroupOutcome.TRAINED, 7, {}))
        assert check_same(index, journal)[0].outcome == "step 7"
        write(journal, OutsideEvent(UNDONE, "aaa1", {"reason": "its weights are gone"}, 5.0))
        assert check_same(index, journal)[0].dropped == "session"


@pytest.mark.parametrize("batch", [1, 3, 1000])
def test_rows_are_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(module, "BATCH", batch)
    with open_journal(tmp_path) as journal:
        index = JournalIndex(journal.path)
        for number in range(4):
            write_drifted_session(journal, f"s{number}")
            check_same(index, journal)


async def test_what_was_deleted_leaves_it_and_numbers_that_are_given_again_are_read(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        index = JournalIndex(journal.path)
        for number in range(3):
            name = f"s{number}"
            write(journal, session_opened(name), call_started(name, name), chunk_appended([1, 2], name))
            write(journal, SessionClosed(name, "finished"))
        write(journal, HandOverBegun("s0"), HandedOver("s0", 1.0))
        assert len(check_same(index, journal)) == 3
        await journal.compact(2.0)
        assert [one.session_id for one in check_same(index, journal)] == ["s1", "s2"]
        write(journal, HandOverBegun("s1"), HandedOver("s1", 1.0), HandOverBegun("s2"), HandedOver("s2", 1.0))
        await journal.compact(2.0)
        write(journal, session_opened("new"), call_started("new", "new"), chunk_appended([3], "new"))
        assert [one.tokens for one in check_same(index, journal)] == [1]


def test_a_file_in_the_place_of_another_is_read_anew(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with open_journal(tmp_path / name) as journal:
            write_drifted_session(journal, name * 4)
    path = tmp_path / "a" / "journal.sqlite"
    index = JournalIndex(path)
    index.refresh()
    (tmp_path / "b" / "journal.sqlite").replace(path)
    index.refresh()
    assert [one.session_id for one in index.entries()] == ["bbbb"]


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalError):
        JournalIndex(tmp_path / "nothing.sqlite").refresh()
    (tmp_path / "text.sqlite").write_text("not a database, but long enough to be taken for one" * 20)
    with pytest.raises(JournalError):
        JournalIndex(tmp_path / "text.sqlite").refresh()


def test_sums() -> None:
    blobs: list[Any] = [logprobs(values).tobytes() for values in ([-1.0, -2.0], [], [-0.5])]
    assert sums_of(blobs) == [-3.0, 0.0, -0.5]
    assert sums_of([]) == []
