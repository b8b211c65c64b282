"""A journal that refuses an append: the call fails, and its tokens are on record and in the account as dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.journal import open_journal

from seamless_verl.errors import JournalOrderError
from seamless_verl.gateway.calls import SessionCall
from seamless_verl.gateway.recorder import FLUSH_S, JournalRecorder
from seamless_verl.gateway.session import Session
from seamless_verl.journal import SqliteJournal
from seamless_verl.journal.stored import rebuild_record
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.records import Finish, TokenChunk, logprobs, tokens
from seamless_verl.trajectory.sequences import assemble

GOOD, BAD = [{"role": "user", "content": "hi"}], [{"role": "tool", "content": iter(())}]
Send = Callable[[JournalRecorder, SessionCall], Awaitable[None]]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[SqliteJournal]:
    with open_journal(tmp_path) as opened:
        yield opened


def chunk(*ids: int, finish: Finish | None = None) -> TokenChunk:
    return TokenChunk(tokens(ids), logprobs([-1.0] * len(ids)), 3, "r", finish)


async def end(recorder: JournalRecorder, call: SessionCall, finish: Finish = Finish.STOP, **reply: Any) -> None:
    await recorder.record_chunk(call, chunk(7, finish=finish))
    await recorder.end_call(call, finish, reply)


async def all_at_the_end(recorder: JournalRecorder, call: SessionCall) -> None:
    recorder.buffer_chunk(call, chunk(5, 6))
    await end(recorder, call, text=iter(()))


async def flushed_before(recorder: JournalRecorder, call: SessionCall) -> None:
    recorder.buffer_chunk(call, chunk(5))
    await asyncio.sleep(3 * FLUSH_S)
    recorder.buffer_chunk(call, chunk(6))
    await end(recorder, call, text=iter(()))


async def streamed(recorder: JournalRecorder, call: SessionCall) -> None:
    await recorder.record_chunk(call, chunk(5))
    await recorder.record_chunk(call, chunk(6))
    await end(recorder, call, text=iter(()))


@pytest.mark.parametrize("messages", [GOOD, BAD], ids=["a bad reply", "a bad request"])
@pytest.mark.parametrize("send", [all_at_the_end, flushed_before, streamed])
async def test_the_tokens_of_a_call_that_cannot_be_written_are_dropped_as_failed(
    journal: SqliteJournal, messages: Any, send: Send
) -> None:
    recorder, session = JournalRecorder(journal), Session("s", "u", b"")
    await recorder.open_session(session)
    call = SessionCall("s.1", tokens([1, 2]), {}, session_id="s", request={"messages": messages})
    await recorder.start_call(call)
    with pytest.raises((TypeError, JournalOrderError)):
        await send(recorder, call)
    for _ in range(2):  # as its supervisor does: once more, or for the first time if a chunk was refused
        with suppress(TypeError, JournalOrderError):
            await recorder.end_call(call, Finish.FAILED, {})
    await recorder.close_session(session, "finished")
    stored = journal.read("s")
    assert stored is not None
    for record in (recorder.record("s"), rebuild_record(stored)):
        account = assemble(record, TrainAll(), 3).account
        assert account.generated == account.dropped[DropReason.FAILED] >= 1 and account.trained == 0
    (call_on_record,) = stored.calls
    kept = [token for segment in call_on_record.segments for token in segment.ids]
    assert kept == [5, 6, 7][: len(kept)] and len(kept) == account.generated, "all that was generated until then"


async def test_a_call_that_has_ended_is_not_ended_again(journal: SqliteJournal) -> None:
    recorder, session = JournalRecorder(journal), Session("s", "u", b"")
    await recorder.open_session(session)
    call = SessionCall("s.1", tokens([1, 2]), {}, session_id="s", request={"messages": GOOD})
    await recorder.start_call(call)
    await end(recorder, call, text="x")
    await recorder.end_call(call, Finish.FAILED, {})
    (turn,) = recorder.record("s").turns
    assert turn.finish is Finish.STOP
    stored = journal.read("s")
    assert stored is not None and [one.finish for one in stored.calls] == [Finish.STOP]
