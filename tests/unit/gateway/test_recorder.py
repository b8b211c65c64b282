"""The journal buffer: one append a call at a time, and every error of an append reaches its call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.journal import open_journal

from seamless_verl.errors import JournalOrderError
from seamless_verl.gateway.recorder import FLUSH_S, JournalBuffer, JournalRecorder
from seamless_verl.gateway.session import SessionLimits
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.journal import CallEnded, CallStarted, ChunkAppended, Event
from seamless_verl.journal.stored import rebuild_record
from seamless_verl.tools.view.index import JournalIndex
from seamless_verl.tools.view.sessions import is_failed
from seamless_verl.trajectory.records import Finish, TokenChunk, logprobs, tokens
from seamless_verl.trajectory.session import Closed


class SlowJournal:
    """A journal whose appends are done when the test says so."""

    def __init__(self) -> None:
        self.appends: list[tuple[tuple[Event, ...], asyncio.Future[None]]] = []

    def append(self, *events: Event) -> asyncio.Future[None]:
        self.appends.append((events, asyncio.get_running_loop().create_future()))
        return self.appends[-1][1]

    @property
    def counts(self) -> list[int]:
        return [len(events) for events, _ in self.appends]


def start(call_id: str) -> CallStarted:
    return CallStarted("s", call_id, "d", tokens([1]), {})


def token(call_id: str, number: int) -> ChunkAppended:
    return ChunkAppended(call_id, TokenChunk(tokens([number]), logprobs([-1.0]), 0, "r"))


async def wait_for_appends(journal: SlowJournal, number: int) -> None:
    async with asyncio.timeout(10):
        while len(journal.appends) < number:  # noqa: ASYNC110 the stub has no event
            await asyncio.sleep(0.001)


async def test_a_call_has_one_append_under_way_however_slow_the_journal_is() -> None:
    buffer = JournalBuffer(journal := SlowJournal())
    buffer.start(start("a"))
    for number in range(5):
        buffer.add(token("a", number))
        await asyncio.sleep(1.5 * FLUSH_S)
    assert journal.counts[0] == 2 and len(journal.appends) == 1
    journal.appends[0][1].set_result(None)
    await wait_for_appends(journal, 2)
    assert journal.counts == [2, 4]
    ending = asyncio.ensure_future(buffer.append("a", CallEnded("a", Finish.STOP, {})))
    journal.appends[2][1].set_result(None)
    await asyncio.sleep(0)
    assert not ending.done(), "its tokens are not in the journal yet"
    journal.appends[1][1].set_result(None)
    await ending


async def test_each_call_has_its_own_append_and_all_are_flushed_together() -> None:
    buffer = JournalBuffer(journal := SlowJournal())
    for name in "ab":
        buffer.start(start(name))
        buffer.add(token(name, 1))
    buffer.start(start("c"))
    await wait_for_appends(journal, 2)
    await asyncio.sleep(1.5 * FLUSH_S)
    assert [events[0].call_id for events, _ in journal.appends] == ["a", "b"], "a call has no tokens yet"


@pytest.mark.parametrize("more", [True, False], ids=["another chunk", "the end"])
async def test_the_error_of_an_append_reaches_the_next_chunk_or_the_end(more: bool) -> None:
    buffer = JournalBuffer(journal := SlowJournal())
    buffer.start(start("a"))
    buffer.add(token("a", 1))
    await wait_for_appends(journal, 1)
    journal.appends[0][1].set_exception(JournalOrderError("starting", "a", "no such session"))
    await asyncio.sleep(0)
    with pytest.raises(JournalOrderError, match="no such session"):
        if more:
            buffer.add(token("a", 2))
        else:
            ending: Any = buffer.append("a", CallEnded("a", Finish.STOP, {}))
            journal.appends[1][1].set_result(None)
            await ending


async def test_a_session_that_expired_is_shown_as_one_that_failed(tmp_path: Path) -> None:
    now = [0.0]
    table = SessionTable(clock=lambda: now[0])
    with open_journal(tmp_path) as journal:
        recorder = JournalRecorder(journal)
        session, _ = table.open("u", limits=SessionLimits(lifetime=1))
        await recorder.open_session(session)
        now[0] = 2.0
        (expired,) = table.expire()
        assert expired is session
        await recorder.close_session(session, str(session.reason))
        stored = journal.read(session.session_id)
        assert stored is not None and rebuild_record(stored, all_calls=True).closed is Closed.EXPIRED
        index = JournalIndex(journal.path)
        index.refresh()
        (entry,) = index.entries()
        assert entry.reason == "expired" and is_failed(entry)
