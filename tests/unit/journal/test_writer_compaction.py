"""What compaction may delete."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.journal import delta, ended, generated, journal_at, opened, started, write

from seamless_verl.journal import HandedOver, HandOverBegun, SessionClosed, SqliteJournal, Stage


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
        assert done.sessions == 4
        assert [one.stage for one in journal.sessions()] == [Stage.CLOSED] * 5 + [Stage.OPEN] * 5
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
