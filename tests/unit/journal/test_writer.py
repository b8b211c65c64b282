"""The writer: what an append promises, and what is left when the journal is closed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from pathlib import Path
from sqlite3 import Connection

import pytest
from support.journal import delta, ended, generated, journal_at, opened, started, write

from seamless_verl.errors import ConfigError, JournalError, JournalOrderError
from seamless_verl.journal import CallEnded, CallStarted, JournalReader, RewardPosted, SqliteJournal
from seamless_verl.journal import writer as sqlite
from seamless_verl.journal.prefix import BLOCK, PrefixDigests
from seamless_verl.journal.validator import Validator
from seamless_verl.journal.writer import Append
from seamless_verl.runtime.locks import lock_file
from seamless_verl.trajectory.records import Finish


def test_concurrent_appends_share_transactions_and_keep_each_callers_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    commit = sqlite.commit

    def counted(db: Connection, book: Validator, group: list[Append]) -> None:
        groups.append(len(group))
        commit(db, book, group)

    monkeypatch.setattr(sqlite, "commit", counted)

    async def agent(journal: SqliteJournal, name: str) -> None:
        await journal.append(opened(name), started(name, name))
        for token in range(50):
            await journal.append(delta([token], name))

    async def run(journal: SqliteJournal) -> None:
        await asyncio.gather(*(agent(journal, f"s{i}") for i in range(32)))

    with journal_at(tmp_path) as journal:
        asyncio.run(run(journal))
        assert [generated(journal, f"s{i}") for i in range(32)] == [[[*range(50)]]] * 32
    assert sum(groups) == 32 * 51 and len(groups) < 32 * 51 / 4


def test_appends_that_are_not_waited_for_keep_their_order(tmp_path: Path) -> None:
    async def run(journal: SqliteJournal) -> None:
        waits = [journal.append(opened(), started()), *(journal.append(delta([token])) for token in range(3000))]
        await asyncio.gather(*waits)

    with journal_at(tmp_path) as journal:
        asyncio.run(run(journal))
        assert generated(journal) == [[*range(3000)]]


def test_giving_up_the_wait_does_not_take_the_events_back(tmp_path: Path) -> None:
    async def run(journal: SqliteJournal) -> None:
        journal.append(opened(), started(), delta([7])).cancel()
        await journal.append(delta([8]))

    with journal_at(tmp_path) as journal:
        asyncio.run(run(journal))
        assert generated(journal) == [[7, 8]]


def test_a_loop_that_went_away_stops_nobody_else(tmp_path: Path) -> None:
    with journal_at(tmp_path) as journal:

        async def leave() -> None:
            journal.append(opened())
            for token in range(2000):
                journal.append(RewardPosted("s", "score", token))

        asyncio.run(leave())
        write(journal, started())
        assert generated(journal) == [[]]


def test_threads_append_without_a_loop(tmp_path: Path) -> None:
    with journal_at(tmp_path) as journal:

        def agent(name: str) -> None:
            write(journal, opened(name), started(name, name))
            for token in range(100):
                write(journal, delta([token], name))

        threads = [threading.Thread(target=agent, args=(f"s{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [generated(journal, f"s{i}") for i in range(4)] == [[[*range(100)]]] * 4


def test_a_refused_append_says_why_and_its_neighbours_are_kept(tmp_path: Path) -> None:
    async def run(journal: SqliteJournal) -> list[BaseException | None]:
        first = journal.append(opened(), started(), delta([1]))
        wrong = journal.append(delta([2]), delta([3], "nowhere"))
        unwritable = journal.append(delta([3]), CallEnded("c", Finish.STOP, {"x": {1}}))
        return await asyncio.gather(first, wrong, unwritable, journal.append(delta([4])), return_exceptions=True)

    with journal_at(tmp_path) as journal:
        first, wrong, unwritable, last = asyncio.run(run(journal))
        assert first is None and last is None
        assert isinstance(wrong, JournalOrderError) and "nowhere" in str(wrong) and "no such call" in str(wrong)
        assert isinstance(unwritable, TypeError)
        assert generated(journal) == [[1, 4]]


def test_closing_makes_durable_what_was_appended_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    journal = journal_at(tmp_path)
    waits = [journal.submit(opened(), started()), *(journal.submit(delta([i])) for i in range(500))]
    journal.close()
    journal.close()
    assert all(wait.done() and wait.exception() is None for wait in waits)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
    with pytest.raises(JournalError, match="closed"):
        journal.submit(delta([1]))
    assert not (tmp_path / "journal.sqlite-wal").exists()
    assert generated(journal) == [[*range(500)]]


def test_a_compaction_cut_by_closing_is_answered(tmp_path: Path) -> None:
    async def run(journal: SqliteJournal) -> None:
        wait = asyncio.ensure_future(journal.compact(0.0))
        await asyncio.sleep(0)
        await asyncio.to_thread(journal.close)
        try:
            await wait
        except JournalError as error:
            assert "closed" in str(error)

    asyncio.run(asyncio.wait_for(run(journal_at(tmp_path)), 30))


def test_one_journal_has_one_writer(tmp_path: Path) -> None:
    with journal_at(tmp_path), pytest.raises(ConfigError, match="another journal writes"):
        journal_at(tmp_path)
    journal_at(tmp_path).close()


def test_who_only_looks_for_a_writer_keeps_none_out(tmp_path: Path) -> None:
    journal_at(tmp_path).close()
    look = os.open(lock_file(tmp_path / "journal.sqlite"), os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    threading.Timer(0.02, os.close, [look]).start()  # many times as long as a look takes
    journal_at(tmp_path).close()


def test_a_reader_sees_whole_appends_while_it_is_written(tmp_path: Path) -> None:
    reader = JournalReader(tmp_path / "journal.sqlite")
    lengths: list[int] = []

    async def run(journal: SqliteJournal) -> None:
        await journal.append(opened(), started())
        writer = asyncio.ensure_future(produce(journal))
        while not writer.done():
            record = await asyncio.to_thread(reader.read, "s")
            assert record is not None
            ids = [token for segment in record.calls[0].segments for token in segment.ids]
            assert ids == [*range(len(ids))] and len(ids) % 10 == 0
            lengths.append(len(ids))

    async def produce(journal: SqliteJournal) -> None:
        for first in range(0, 5000, 10):
            await journal.append(delta(range(first, first + 4)), delta(range(first + 4, first + 10)))

    with journal_at(tmp_path) as journal:
        asyncio.run(run(journal))
    assert lengths == sorted(lengths) and len(set(lengths)) > 2


def test_a_call_from_before_a_restart_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with SqliteJournal(path) as journal:
        write(journal, opened(), started(prompt=range(600)), delta([1, 2], version=1))
    with SqliteJournal(path) as journal:
        (session,) = journal.restore()
        assert session.calls[0].cut and session.calls[0].digest == "digest of c"
        write(journal, delta([3], version=1), delta([4], version=2), ended())
        write(journal, started(call_id="again", prompt=[*range(600), 1, 2, 3, 4]))
        (session,) = journal.restore()
    turn = session.calls[0].turn()
    assert [(s.version, s.ids.tolist()) for s in turn.segments] == [(1, [1, 2, 3]), (2, [4])]
    assert turn.finish is Finish.STOP and turn.prompt_ids.tolist() == [*range(600)]
    assert session.calls[1].turn().finish is Finish.CANCELLED
    assert session.calls[1].prompt_ids.tolist() == [*range(600), 1, 2, 3, 4]


def test_a_long_session_is_linear_in_its_tokens(tmp_path: Path) -> None:
    """Its prompts add up to two million tokens, its conversation to forty thousand."""
    path, turns, size = tmp_path / "journal.sqlite", 100, 200
    sequence: list[int] = []
    with journal_at(tmp_path) as journal:
        write(journal, opened())
        for turn in range(turns):
            sequence += range(turn, turn + size)
            produced = [*range(turn * 3, turn * 3 + size)]
            write(journal, started(call_id=f"c{turn}", prompt=sequence), delta(produced, f"c{turn}"))
            write(journal, ended(f"c{turn}"))
            sequence += produced
        record = journal.read("s")
    assert record is not None and record.calls[-1].prompt_ids.tolist() == sequence[:-size]
    assert path.stat().st_size < turns * (2 * size * 4 + size * 4 + BLOCK + 500) + 20 * 4096


def test_the_index_of_prefixes_is_bounded_and_forgetting_costs_bytes_only(tmp_path: Path) -> None:
    index = PrefixDigests(limit=4)
    for digest in range(9):
        index.add(bytes([digest]), digest)
        index.owner(bytes([0]))
    assert len(index) == 4 and index.owner(bytes([0])) == 0 and index.owner(bytes([1])) is None


@pytest.mark.parametrize("shared", [0, 255, 256, 257, 511, 512, 700])
def test_forks_of_a_session_share_their_trunk_and_stay_apart_after_it(tmp_path: Path, shared: int) -> None:
    trunk, first = [*range(600)], [*range(600, 700)]
    fork = (trunk + first)[:shared] + [9] * 300
    with journal_at(tmp_path) as journal:
        write(journal, opened(), started(call_id="a", prompt=trunk), delta(first[:50], "a"), delta(first[50:], "a"))
        write(journal, started(call_id="b", prompt=fork), delta([9] * 300, "b"))
        write(journal, started(call_id="c", prompt=[*fork, *[9] * 300, 5]))
        write(journal, opened("other"), started("other", "d", prompt=fork))
        record, other = journal.read("s"), journal.read("other")
    assert record is not None and other is not None
    prompts = [trunk, fork, [*fork, *[9] * 300, 5], fork]
    assert [call.prompt_ids.tolist() for call in [*record.calls, *other.calls]] == prompts


def test_a_refused_append_is_nobodys_base(tmp_path: Path) -> None:
    prompt = [*range(600)]
    with journal_at(tmp_path) as journal:
        write(journal, opened())
        with pytest.raises(JournalOrderError):
            write(journal, started(call_id="refused", prompt=prompt), delta([1], "nowhere"))
        write(journal, started(call_id="kept", prompt=prompt))
        record = journal.read("s")
    assert record is not None and [call.prompt_ids.tolist() for call in record.calls] == [prompt]


def test_requests_are_given_back_whole_though_stored_by_difference(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": f"wörd {i} " * 60} for i in range(6)]
    requests = [{"messages": messages[:i], "model": "m", "tools": [{"name": "t" * 999}]} for i in (1, 3, 6, 2)]
    with journal_at(tmp_path) as journal:
        write(journal, opened())
        for i, request in enumerate(requests):
            write(journal, CallStarted("s", f"c{i}", "d", delta([1]).ids, request))
        record = journal.read("s")
    assert record is not None and [call.request for call in record.calls] == requests
