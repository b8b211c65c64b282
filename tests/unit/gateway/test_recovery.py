"""Recovery: after a restart, recorder and sessions are as before, wherever the journal ended."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.rollout import until

from seamless_verl.errors import JournalError
from seamless_verl.gateway.api_errors import ApiError
from seamless_verl.gateway.calls import SessionCall
from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.recovery import repeatable_attempts, restore_sessions
from seamless_verl.gateway.retries import MAX_ATTEMPTS, Attempts
from seamless_verl.gateway.session import SamplingParameters, Session, SessionLimits, SessionSampling
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.journal import RequestRefused, SqliteJournal, Stage, StoredCall
from seamless_verl.journal.reader import read_closed_session
from seamless_verl.trajectory.records import Finish, Segment, TokenChunk, logprobs, tokens

REPLY = {"role": "assistant", "content": "a reply"}


def make_call(session: Session, prompt: Sequence[int], key: str | None = None) -> SessionCall:
    session.requests += 1
    session.turns += 1
    return SessionCall(
        f"{session.session_id}.{session.requests}",
        tokens(prompt),
        {"max_tokens": 90},
        session_id=session.session_id,
        digest=f"d{session.requests}",
        request={"messages": [{"role": "user", "content": str(session.requests)}]},
        attempt=session.requests,
        idempotency_key=key,
    )


def make_chunk(ids: Sequence[int], version: int = 0, finish: Finish | None = None) -> TokenChunk:
    return TokenChunk(tokens(ids), logprobs([-float(i) for i in ids]), version, "r", finish)


def describe(segments: Sequence[Segment]) -> list[tuple[Any, ...]]:
    return [(one.ids.tolist(), one.logprobs.tolist(), one.version, one.replica) for one in segments]


CHUNKS = st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 2)), max_size=5)
FINISHES = st.sampled_from([Finish.STOP, Finish.LENGTH, Finish.TOOL_CALLS, Finish.CANCELLED, Finish.FAILED, None])
CALLS = st.lists(st.tuples(CHUNKS, FINISHES).filter(any), max_size=6)
"""Calls with tokens or an end: of any other the agent has seen nothing."""


async def run_calls(recorder: JournalRecorder, session: Session, calls: list[Any]) -> None:
    for number, (chunks, finish) in enumerate(calls):
        call = make_call(session, [1, 2, number], key=f"k{number}")
        await recorder.start_call(call)
        for position, (ids, version) in enumerate(chunks, 1):
            chunk = make_chunk(ids, version)
            if position < len(chunks):
                recorder.buffer_chunk(call, chunk)
            else:
                await recorder.record_chunk(call, chunk)
            session.tokens += len(ids)
        if finish is not None:
            await recorder.record_chunk(call, make_chunk([7], 3, finish))
            session.tokens += 1
            await recorder.end_call(call, finish, {"message": REPLY})


@hypothesis_settings(max_examples=40, deadline=None)
@given(CALLS)
def test_a_restored_session_is_as_before(calls: list[Any]) -> None:
    async def case(folder: Path) -> None:
        with SqliteJournal(folder / "journal.sqlite") as journal:
            before, table = JournalRecorder(journal), SessionTable()
            limits, sampling = (
                SessionLimits(max_tokens=9, lifetime=1e9),
                SessionSampling(defaults=SamplingParameters(top_p=0.5), max_tokens=3),
            )
            session, key = table.open("u", limits=limits, sampling=sampling, metadata={"a": [1]})
            await before.open_session(session)
            await run_calls(before, session, calls)
            await before.post_reward(session, "reward", 0.5)
            after, later = JournalRecorder(journal), SessionTable()
            assert await restore_sessions(journal, after, later) == 1
            check_same_session(later.by_key(key), session)
            check_same_record(after, before, session.session_id)
            await check_closing(journal, after, later.by_key(key), calls)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(case(Path(folder)))


def check_same_session(now: Session, then: Session) -> None:
    assert (now.describe(), now.requests) == (then.describe(), then.requests)
    assert (now.limits, now.sampling, now.opened_at) == (then.limits, then.sampling, then.opened_at)
    assert now.deadline == pytest.approx(then.deadline, abs=60), "by the clock of another process"


def check_same_record(after: JournalRecorder, before: JournalRecorder, session_id: str) -> None:
    now, then = after.record(session_id), before.record(session_id)
    assert now.rewards == then.rewards and now.is_open
    assert [describe_turn(turn) for turn in now.turns] == [describe_turn(turn) for turn in then.turns]
    running = {name: describe(segments) for name, segments in before._segments.items()}
    assert {name: describe(segments) for name, segments in after._segments.items()} == running
    now.check_integrity()


def describe_turn(turn: Any) -> tuple[Any, ...]:
    segments = [node.segment for node in turn.generated_nodes()]
    return turn.turn_id, turn.prompt_ids(), describe(segments), turn.finish, turn.request, turn.reply


async def check_closing(journal: SqliteJournal, after: JournalRecorder, session: Session, calls: list[Any]) -> None:
    """Retries find their attempts; then the session is closed: no token is lost, and every call has an end."""
    for number, (_, finish) in enumerate(calls):
        offered = session.attempts.find(f"d{number + 1}", key=f"k{number}", retry=False)
        assert (offered is not None) == (finish not in (Finish.CANCELLED, Finish.FAILED))
        assert offered is None or (bool(offered.interrupted_calls), offered.number) == (finish is None, number + 1)
    await after.close_session(session, "finished")
    record, stored = after.take(session.session_id), journal.read(session.session_id)
    assert stored is not None and stored.stage is Stage.CLOSED and not any(call.interrupted for call in stored.calls)
    assert record.tree.generated == session.tokens == read_closed_session(journal, session.session_id).tree.generated
    ends = {turn.turn_id: turn.finish for turn in record.turns}
    assert [ends[call.call_id] for call in stored.calls] == [finish or Finish.CANCELLED for _, finish in calls]


@asynccontextmanager
async def open_recorder(folder: Path) -> AsyncIterator[tuple[SqliteJournal, JournalRecorder, Session]]:
    """A recorder with an open session."""
    with SqliteJournal(folder / "journal.sqlite") as journal:
        recorder, (session, _) = JournalRecorder(journal), SessionTable().open("u")
        await recorder.open_session(session)
        yield journal, recorder, session


async def test_a_chunk_that_is_being_appended_is_recorded_when_its_call_is_cancelled(tmp_path: Path) -> None:
    async with open_recorder(tmp_path) as (journal, recorder, session):
        call = make_call(session, [1])
        await recorder.start_call(call)
        writing = asyncio.create_task(recorder.record_chunk(call, make_chunk([5, 6])))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
        await recorder.end_call(call, Finish.CANCELLED, {})
        record, stored = recorder.record(session.session_id), journal.read(session.session_id)
        assert stored is not None and writing.cancelled()
        assert record.turns[0].generated_ids() == stored.calls[0].turn().generated_ids == tokens([5, 6])


def stored_calls(journal: SqliteJournal, session: Session) -> Sequence[StoredCall]:
    stored = journal.read(session.session_id)
    assert stored is not None
    return stored.calls


async def test_buffered_chunks_are_journalled_soon_and_a_call_without_tokens_is_not(tmp_path: Path) -> None:
    async with open_recorder(tmp_path) as (journal, recorder, session):
        silent, speaking = make_call(session, [1]), make_call(session, [1, 2])
        for call in (silent, speaking):
            await recorder.start_call(call)
        recorder.buffer_chunk(speaking, make_chunk([5]))
        recorder.buffer_chunk(speaking, make_chunk([6], version=1))
        await until(lambda: bool(stored_calls(journal, session)))
        (call,) = stored_calls(journal, session)
        assert (call.call_id, [list(one.ids) for one in call.segments]) == (speaking.call_id, [[5], [6]])
        await recorder.end_call(speaking, Finish.CANCELLED, {})
        await recorder.end_call(silent, Finish.CANCELLED, {})
        assert [turn.turn_id for turn in recorder.record(session.session_id).turns] == [
            speaking.call_id,
            silent.call_id,
        ]


async def test_a_call_gets_the_error_when_its_tokens_cannot_be_journalled(tmp_path: Path) -> None:
    async with open_recorder(tmp_path) as (journal, recorder, session):
        call = make_call(session, [1])
        await recorder.start_call(call)
        recorder.buffer_chunk(call, make_chunk([5]))
        journal.close()
        with pytest.raises(JournalError, match="it is closed"):
            while True:  # until the first one is flushed
                recorder.buffer_chunk(call, make_chunk([6]))
                await asyncio.sleep(0)
        with pytest.raises(JournalError, match="it is closed"):
            await recorder.end_call(call, Finish.STOP, {})


async def test_a_retry_finds_an_interrupted_call_before_one_that_ended() -> None:
    calls = [stored_call(number, finish) for number, finish in ((1, Finish.STOP), (2, None), (3, Finish.STOP))]
    attempts = Attempts()
    for attempt in repeatable_attempts(calls):
        attempts.add(attempt)
    found = [attempts.find("d", key=None, retry=True) for _ in range(4)]
    assert [one and one.number for one in found] == [2, 1, 3, None]


def test_interrupted_calls_are_never_forgotten_and_of_the_others_the_latest_are_kept() -> None:
    calls = [stored_call(number, None if number < 3 else Finish.STOP) for number in range(1, 3 * MAX_ATTEMPTS)]
    numbers = [attempt.number for attempt in repeatable_attempts(calls)]
    assert numbers == [1, 2, *range(2 * MAX_ATTEMPTS, 3 * MAX_ATTEMPTS)]


def stored_call(number: int, finish: Finish | None) -> StoredCall:
    own = {"gateway": {"attempt": number, "place": 0, "max_tokens": 9, "reply": "r"}}
    return StoredCall(f"s.{number}", "d", tokens([1]), (), finish, own, {})


async def test_a_stored_response_can_be_continued_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ]
    with SqliteJournal(path) as journal:
        recorder = JournalRecorder(journal)
        session, _ = SessionTable().open("u")
        await recorder.open_session(session)
        response = {"id": "resp_1", "model": "m", "instructions": True}
        call = replace(make_call(session, [1]), request={"messages": messages}, response=response)
        await recorder.start_call(call)
        await recorder.record_chunk(call, make_chunk([2], finish=Finish.STOP))
        await recorder.end_call(call, Finish.STOP, {"message": REPLY})
    table = SessionTable()
    with SqliteJournal(path) as journal:
        await restore_sessions(journal, JournalRecorder(journal), table)
    stored = table.get(session.session_id).responses.get("resp_1")
    assert stored is not None and stored.body["output"][0]["content"][0]["text"] == "a reply"
    user, made, result, reply = stored.items
    assert (user["content"], made.name, result["output"], reply.content[0].text) == ("add", "f", "5", "a reply")
    assert (reply.id, stored.body["output"][0]["id"]) == ("msg_1_0", "msg_1_0")


async def test_what_a_caller_sends_does_not_stop_the_journal(tmp_path: Path) -> None:
    with SqliteJournal(tmp_path / "journal.sqlite") as journal:
        recorder = JournalRecorder(journal)
        session, _ = SessionTable().open("u")
        await recorder.open_session(session)
        with pytest.raises(UnicodeEncodeError):
            await recorder.post_reward(session, "\ud800", 1.0)
        with pytest.raises(OverflowError):
            await journal.append(RequestRefused(session.session_id, "/", 1 << 64, "", 0.0))
        recorder.note_refusal(session, "/v1/\ud800", 400, "x" * 5000)
        await recorder.post_reward(session, "reward", 0.5)
        await recorder.post_reward(session, "reward", 0.75)
        await recorder.close_session(session, "finished")
        stored = journal.read(session.session_id)
        assert stored is not None and stored.rewards == {"reward": 0.75}, "the last one of a name counts"
        (refused,) = stored.refused
        assert (refused.path, refused.status, len(refused.message)) == ("/v1/?", 400, 1000)
        recorder.take(session.session_id)
        with pytest.raises(ApiError, match="handed over"):
            await recorder.post_reward(session, "reward", 1.0)
