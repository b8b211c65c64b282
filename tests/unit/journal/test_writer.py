"""The writer: the guarantees of an append, and the state after the journal is closed."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import threading
from pathlib import Path
from sqlite3 import Connection

import pytest
from support.journal import call_ended, call_started, chunk_appended, generated_ids, open_journal, session_opened, write

from seamless_verl.errors import ConfigError, JournalError, JournalOrderError
from seamless_verl.journal import CallEnded, JournalReader, RewardPosted, SessionClosed, SqliteJournal
from seamless_verl.journal import writer as writer_module
from seamless_verl.journal.prefix import BLOCK_BYTES, PrefixDigests
from seamless_verl.journal.schema import open_for_writing, pack
from seamless_verl.journal.validator import Validator
from seamless_verl.journal.writer import PendingAppend
from seamless_verl.runtime.locks import lock_file
from seamless_verl.trajectory.records import Finish, tokens


async def test_concurrent_appends_share_transactions_and_keep_each_callers_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    commit = writer_module.commit_group

    def count_group(db: Connection, validator: Validator, group: list[PendingAppend]) -> None:
        groups.append(len(group))
        commit(db, validator, group)

    monkeypatch.setattr(writer_module, "commit_group", count_group)

    async def agent(journal: SqliteJournal, name: str) -> None:
        await journal.append(session_opened(name), call_started(name, name))
        for token in range(50):
            await journal.append(chunk_appended([token], name))

    async def run(journal: SqliteJournal) -> None:
        await asyncio.gather(*(agent(journal, f"s{i}") for i in range(32)))

    with open_journal(tmp_path) as journal:
        await run(journal)
        assert [generated_ids(journal, f"s{i}") for i in range(32)] == [[[*range(50)]]] * 32
    assert sum(groups) == 32 * 51 and len(groups) < 32 * 51 / 4


async def test_appends_that_are_not_waited_for_keep_their_order(tmp_path: Path) -> None:
    async def run(journal: SqliteJournal) -> None:
        waits = [
            journal.append(session_opened(), call_started()),
            *(journal.append(chunk_appended([token])) for token in range(3000)),
        ]
        await asyncio.gather(*waits)

    with open_journal(tmp_path) as journal:
        await run(journal)
        assert generated_ids(journal) == [[*range(3000)]]


async def test_giving_up_the_wait_does_not_take_the_events_back(tmp_path: Path) -> None:
    async def run(journal: SqliteJournal) -> None:
        journal.append(session_opened(), call_started(), chunk_appended([7])).cancel()
        await journal.append(chunk_appended([8]))

    with open_journal(tmp_path) as journal:
        await run(journal)
        assert generated_ids(journal) == [[7, 8]]


def test_a_closed_loop_stops_no_other_caller(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:

        async def leave() -> None:
            journal.append(session_opened())
            for token in range(2000):
                journal.append(RewardPosted("s", "score", token))

        asyncio.run(leave())
        write(journal, call_started())
        assert generated_ids(journal) == [[]]


def test_threads_append_without_a_loop(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:

        def agent(name: str) -> None:
            write(journal, session_opened(name), call_started(name, name))
            for token in range(100):
                write(journal, chunk_appended([token], name))

        threads = [threading.Thread(target=agent, args=(f"s{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [generated_ids(journal, f"s{i}") for i in range(4)] == [[[*range(100)]]] * 4


async def test_a_rejected_append_has_the_reason_and_its_neighbours_are_kept(tmp_path: Path) -> None:
    async def run(journal: SqliteJournal) -> list[BaseException | None]:
        first = journal.append(session_opened(), call_started(), chunk_appended([1]))
        wrong = journal.append(chunk_appended([2]), chunk_appended([3], "nowhere"))
        unwritable = journal.append(chunk_appended([3]), CallEnded("c", Finish.STOP, {"x": {1}}))
        return await asyncio.gather(
            first, wrong, unwritable, journal.append(chunk_appended([4])), return_exceptions=True
        )

    with open_journal(tmp_path) as journal:
        first, wrong, unwritable, last = await run(journal)
        assert first is None and last is None
        assert isinstance(wrong, JournalOrderError) and "nowhere" in str(wrong) and "no such call" in str(wrong)
        assert isinstance(unwritable, TypeError)
        assert generated_ids(journal) == [[1, 4]]


def test_closing_makes_durable_what_was_appended_and_leaves_nothing_behind(tmp_path: Path) -> None:
    gc.collect()  # what earlier tests left to it would be closed meanwhile
    threads, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    journal = open_journal(tmp_path)
    waits = [
        journal.submit(session_opened(), call_started()),
        *(journal.submit(chunk_appended([i])) for i in range(500)),
    ]
    journal.close()
    journal.close()
    assert all(wait.done() and wait.exception() is None for wait in waits)
    assert set(threading.enumerate()) <= threads
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    with pytest.raises(JournalError, match="closed"):
        journal.submit(chunk_appended([1]))
    assert not (tmp_path / "journal.sqlite-wal").exists()
    assert generated_ids(journal) == [[*range(500)]]


async def test_a_compaction_interrupted_by_closing_is_resolved(tmp_path: Path) -> None:
    async def run(journal: SqliteJournal) -> None:
        wait = asyncio.ensure_future(journal.compact(0.0))
        await asyncio.sleep(0)
        await asyncio.to_thread(journal.close)
        try:
            await wait
        except JournalError as error:
            assert "closed" in str(error)

    await asyncio.wait_for(run(open_journal(tmp_path)), 30)


def test_one_journal_has_one_writer(tmp_path: Path) -> None:
    with open_journal(tmp_path), pytest.raises(ConfigError, match="another journal writes"):
        open_journal(tmp_path)
    open_journal(tmp_path).close()


def test_a_probe_for_a_writer_keeps_no_writer_out(tmp_path: Path) -> None:
    open_journal(tmp_path).close()
    look = os.open(lock_file(tmp_path / "journal.sqlite"), os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    threading.Timer(0.02, os.close, [look]).start()  # many times as long as a look takes
    open_journal(tmp_path).close()


async def test_a_reader_sees_whole_appends_while_it_is_written(tmp_path: Path) -> None:
    reader = JournalReader(tmp_path / "journal.sqlite")
    lengths: list[int] = []

    async def run(journal: SqliteJournal) -> None:
        await journal.append(session_opened(), call_started())
        writer = asyncio.ensure_future(produce(journal))
        while not writer.done():
            record = await asyncio.to_thread(reader.read, "s")
            assert record is not None
            ids = [token for segment in record.calls[0].segments for token in segment.ids]
            assert ids == [*range(len(ids))] and len(ids) % 10 == 0
            lengths.append(len(ids))

    async def produce(journal: SqliteJournal) -> None:
        for first in range(0, 5000, 10):
            await journal.append(chunk_appended(range(first, first + 4)), chunk_appended(range(first + 4, first + 10)))

    with open_journal(tmp_path) as journal:
        await run(journal)
    assert lengths == sorted(lengths) and len(set(lengths)) > 2


def test_a_call_from_before_a_restart_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with SqliteJournal(path) as journal:
        write(journal, session_opened(), call_started(prompt=range(600)), chunk_appended([1, 2], version=1))
    with SqliteJournal(path) as journal:
        (session,) = journal.restore()
        assert session.calls[0].interrupted and session.calls[0].digest == "digest of c"
        write(journal, chunk_appended([3], version=1), chunk_appended([4], version=2), call_ended())
        write(journal, call_started(call_id="again", prompt=[*range(600), 1, 2, 3, 4]))
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
    with open_journal(tmp_path) as journal:
        write(journal, session_opened())
        for turn in range(turns):
            sequence += range(turn, turn + size)
            produced = [*range(turn * 3, turn * 3 + size)]
            write(journal, call_started(call_id=f"c{turn}", prompt=sequence), chunk_appended(produced, f"c{turn}"))
            write(journal, call_ended(f"c{turn}"))
            sequence += produced
        record = journal.read("s")
    assert record is not None and record.calls[-1].prompt_ids.tolist() == sequence[:-size]
    assert path.stat().st_size < turns * (2 * size * 4 + size * 4 + BLOCK_BYTES + 500) + 20 * 4096


def test_the_index_of_prefixes_is_bounded_and_forgetting_costs_bytes_only(tmp_path: Path) -> None:
    index = PrefixDigests(max_blocks=4)
    for session in range(9):
        index.add(session, b"digest", session)
        index.find(0, b"digest")
    assert len(index) == 4 and index.find(0, b"digest") == 0 and index.find(1, b"digest") is None
    for digest in range(9):
        index.add(9, bytes([digest]), digest)
    assert len(index) <= 4 and index.find(9, bytes([8])) == 8


def test_a_closed_session_leaves_nothing_in_the_index(tmp_path: Path) -> None:
    index, prompt = PrefixDigests(), [*range(600)]
    with open_for_writing(tmp_path / "journal.sqlite") as db:
        validator = Validator(db, index)
        for session in ("first", "second"):
            validator.apply([session_opened(session), call_started(session, f"{session}-1", prompt=prompt)])
        both = len(index)
        validator.apply([chunk_appended(prompt, "first-1"), SessionClosed("first", "ended")])
        assert both >= 4 and len(index) == both // 2
        validator.apply([SessionClosed("second", "ended")])
    assert len(index) == 0


@pytest.mark.parametrize("chunks", [1, 63, 64, 65, 200])
def test_few_statements_insert_any_number_of_chunks(tmp_path: Path, chunks: int) -> None:
    statements: list[str] = []
    with open_for_writing(tmp_path / "journal.sqlite") as db:
        validator = Validator(db)
        validator.apply([session_opened(), call_started(), *(chunk_appended([token]) for token in range(chunks))])
        db.set_trace_callback(statements.append)
        writer_module._insert(db, validator.take_rows())
        db.set_trace_callback(None)
        found = [ids for (ids,) in db.execute("SELECT ids FROM deltas ORDER BY n")]
    assert found == [pack(tokens([token])) for token in range(chunks)]
    whole, rest = divmod(chunks, writer_module.ROWS_PER_STATEMENT)
    assert sum("INTO deltas" in text for text in statements) == whole + rest.bit_count()


@pytest.mark.parametrize("shared", [0, 255, 256, 257, 511, 512, 700])
def test_forks_of_a_session_share_their_trunk_and_stay_apart_after_it(tmp_path: Path, shared: int) -> None:
    trunk, first = [*range(600)], [*range(600, 700)]
    fork = (trunk + first)[:shared] + [9] * 300
    with open_journal(tmp_path) as journal:
        write(
            journal,
            session_opened(),
            call_started(call_id="a", prompt=trunk),
            chunk_appended(first[:50], "a"),
            chunk_appended(first[50:], "a"),
        )
        write(journal, call_started(call_id="b", prompt=fork), chunk_appended([9] * 300, "b"))
        write(journal, call_started(call_id="c", prompt=[*fork, *[9] * 300, 5]))
        write(journal, session_opened("other"), call_started("other", "d", prompt=fork))
        record, other = journal.read("s"), journal.read("other")
    assert record is not None and other is not None
    prompts = [trunk, fork, [*fork, *[9] * 300, 5], fork]
    assert [call.prompt_ids.tolist() for call in [*record.calls, *other.calls]] == prompts


def test_a_rejected_append_is_no_calls_base(tmp_path: Path) -> None:
    prompt = [*range(600)]
    with open_journal(tmp_path) as journal:
        write(journal, session_opened())
        with pytest.raises(JournalOrderError):
            write(journal, call_started(call_id="refused", prompt=prompt), chunk_appended([1], "nowhere"))
        write(journal, call_started(call_id="kept", prompt=prompt))
        record = journal.read("s")
    assert record is not None and [call.prompt_ids.tolist() for call in record.calls] == [prompt]


def test_a_call_goes_on_after_a_rejected_append_as_if_that_had_not_been(tmp_path: Path) -> None:
    """What is stored by difference from its tokens is read as it was written."""
    lost, kept = [*range(1000, 1100)], [*range(2000, 2600)]  # fewer tokens than a block has, and more
    prompts = [[1, 2, 3], [1, 2, 3, *lost, *kept], [1, 2, 3, *kept, 4]]
    with open_journal(tmp_path) as journal:
        write(journal, session_opened(), call_started(call_id="c0", prompt=prompts[0]))
        with pytest.raises(JournalOrderError):
            write(journal, chunk_appended(lost, "c0", replica="new"), chunk_appended([1], "nowhere"))
        write(journal, chunk_appended(kept, "c0", replica="new"), call_ended("c0"))
        for number in (1, 2):
            write(journal, call_started(call_id=f"c{number}", prompt=prompts[number]))
        record = journal.read("s")
    assert record is not None and [call.prompt_ids.tolist() for call in record.calls] == prompts
    assert generated_ids(journal)[0] == kept


def test_a_replica_whose_name_cannot_be_written_is_not_taken_for_a_known_one(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, session_opened(), call_started())
        for _ in range(2):
            with pytest.raises(UnicodeEncodeError):
                write(journal, chunk_appended([1], replica="\ud800"))
        write(journal, chunk_appended([2]))
        assert generated_ids(journal) == [[2]]
