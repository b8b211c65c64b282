"""Handing over: once, whatever died in between; and what compaction may delete."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from journal_cases import delta, ended, generated, journal_at, opened, started, write

from seamless_verl.errors import JournalOrderError
from seamless_verl.trajectory.journal import (
    HandedOver,
    Handover,
    HandOverBegun,
    SessionClosed,
    SessionRecord,
    SqliteJournal,
    Stage,
)


class Consumer:
    """Keeps what it was given; may die while it takes."""

    def __init__(self) -> None:
        self.held: dict[str, SessionRecord] = {}
        self.puts, self.dies = 0, ""

    async def put(self, record: SessionRecord) -> None:
        self.puts += 1
        if self.dies == "before":
            raise ConnectionError
        self.held[record.session_id] = record
        if self.dies == "after":
            raise ConnectionError

    async def already_there(self, session_id: str) -> bool:
        return session_id in self.held


def closed_session(journal: SqliteJournal, name: str = "s") -> None:
    write(journal, opened(name), started(name, name), delta([1, 2], name), ended(name), SessionClosed(name, "done"))


def handover(journal: SqliteJournal, to: Consumer) -> Handover:
    return Handover(journal, put=to.put, already_there=to.already_there)


def give(journal: SqliteJournal, to: Consumer, name: str = "s") -> bool:
    return asyncio.run(handover(journal, to).give(name))


def test_a_closed_session_is_given_once(tmp_path: Path) -> None:
    consumer = Consumer()
    with journal_at(tmp_path) as journal:
        closed_session(journal)
        assert journal.unhanded() == ("s",)
        assert give(journal, consumer) and not give(journal, consumer)
        assert journal.unhanded() == () and journal.stage("s") is Stage.HANDED
    assert consumer.puts == 1 and consumer.held["s"].calls[0].segments[0].ids.tolist() == [1, 2]


@pytest.mark.parametrize(("dies", "puts"), [("before", 2), ("after", 1)])
def test_a_death_between_the_gift_and_its_mark_gives_neither_twice_nor_never(
    tmp_path: Path, dies: str, puts: int
) -> None:
    consumer = Consumer()
    consumer.dies = dies
    with journal_at(tmp_path) as journal:
        closed_session(journal)
        with pytest.raises(ConnectionError):
            give(journal, consumer)
    consumer.dies = ""
    with journal_at(tmp_path) as journal:
        assert journal.unhanded() == ("s",) and journal.stage("s") is Stage.HANDING
        assert give(journal, consumer) is (dies == "before")
        assert journal.unhanded() == () and consumer.puts == puts and "s" in consumer.held


def test_an_open_or_unknown_session_is_not_given(tmp_path: Path) -> None:
    with journal_at(tmp_path) as journal:
        write(journal, opened())
        for name in ("s", "nobody"):
            with pytest.raises(JournalOrderError, match="close it first"):
                give(journal, Consumer(), name)


def test_two_tasks_that_hand_over_one_session_give_it_once(tmp_path: Path) -> None:
    consumer = Consumer()

    async def run(both: Handover) -> list[bool]:
        return await asyncio.gather(both.give("s"), both.give("s"))

    with journal_at(tmp_path) as journal:
        closed_session(journal)
        assert asyncio.run(run(handover(journal, consumer))) == [True, False]
    assert consumer.puts == 1


def test_compaction_deletes_only_what_was_handed_over_and_the_file_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with journal_at(tmp_path) as journal:
        for i in range(20):
            name = f"s{i}"
            write(journal, opened(name), started(name, name, range(5000)), delta(range(5000), name), ended(name))
            if i < 15:
                write(journal, SessionClosed(name, "done"))
            if i < 10:
                write(journal, HandOverBegun(name), HandedOver(name, float(i)))
        done = asyncio.run(journal.compact(4.0))
        assert done.sessions == 4 and journal.sessions()[0].session_id == "s4"
        done = asyncio.run(journal.compact(4.0, max_bytes=done.bytes_held - 100_000))
        assert done.sessions == 2
        done = asyncio.run(journal.compact(4.0, max_bytes=0))
        assert done.sessions == 4 and len(journal.sessions()) == len(journal.restore()) + len(journal.unhanded()) == 10
        assert path.stat().st_size == done.bytes_held < 10 * 65_000 + 50_000
        assert generated(journal, "s12") == [[*range(5000)]]
        journal.check_integrity()


def test_agents_go_on_while_the_journal_is_compacted(tmp_path: Path) -> None:
    async def run(journal: SqliteJournal) -> int:
        compaction = asyncio.ensure_future(journal.compact(1.0))
        written = 0
        while not compaction.done():
            await journal.append(delta([written], "live"))
            written += 1
        assert compaction.result().sessions == 200
        return written

    with journal_at(tmp_path) as journal:
        for name in map(str, range(200)):
            write(journal, opened(name), started(name, name), delta([1], name), SessionClosed(name, "done"))
            write(journal, HandOverBegun(name), HandedOver(name, 0.0))
        write(journal, opened("live"), started("live", "live"))
        written = asyncio.run(run(journal))
        assert written > 5 and generated(journal, "live") == [[*range(written)]]
