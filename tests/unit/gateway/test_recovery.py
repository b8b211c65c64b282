"""A recorder and its sessions after a restart are what they were, wherever the journal was left."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as rounds
from hypothesis import strategies as st
from support.rollout import until

from seamless_verl.errors import JournalError
from seamless_verl.gateway.protocols import SessionCall
from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.recovery import GatewayRecovery, attempts_of
from seamless_verl.gateway.retries import KEPT, Attempt, Attempts
from seamless_verl.gateway.session import SessionLimits, SessionSampling
from seamless_verl.gateway.sessions import Session, SessionTable
from seamless_verl.journal import SqliteJournal, Stage, StoredCall
from seamless_verl.journal.recovery import closed_session
from seamless_verl.rollout.call import Piece
from seamless_verl.trajectory.records import Finish, Segment, logprobs, tokens

SAID = {"role": "assistant", "content": "said"}


def call_of(session: Session, prompt: Sequence[int], key: str | None = None) -> SessionCall:
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


def piece(ids: Sequence[int], version: int = 0, finish: Finish | None = None) -> Piece:
    return Piece(tokens(ids), logprobs([-float(i) for i in ids]), version, "r", finish)


def told(segments: Sequence[Segment]) -> list[tuple[Any, ...]]:
    return [(one.ids.tolist(), one.logprobs.tolist(), one.version, one.replica) for one in segments]


PIECES = st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 2)), max_size=5)
ENDS = st.sampled_from([Finish.STOP, Finish.LENGTH, Finish.TOOL_CALLS, Finish.CANCELLED, Finish.FAILED, None])
CALLS = st.lists(st.tuples(PIECES, ENDS).filter(any), max_size=6)
"""Those that have tokens or an end: of any other nobody has seen anything."""


async def lived(recorder: JournalRecorder, session: Session, calls: list[Any]) -> None:
    for number, (pieces, finish) in enumerate(calls):
        call = call_of(session, [1, 2, number], key=f"k{number}")
        await recorder.started(call)
        for place, (ids, version) in enumerate(pieces, 1):
            told_now = piece(ids, version)
            if place < len(pieces):
                recorder.noted(call, told_now)
            else:
                await recorder.piece(call, told_now)
            session.count(len(ids))
        if finish is not None:
            await recorder.piece(call, piece([7], 3, finish))
            session.count(1)
            await recorder.ended(call, finish, {"message": SAID})


@rounds(max_examples=40, deadline=None)
@given(CALLS)
def test_restored_it_is_as_it_was(calls: list[Any]) -> None:
    async def case(folder: Path) -> None:
        with SqliteJournal(folder / "journal.sqlite") as journal:
            before, table = JournalRecorder(journal), SessionTable()
            limits, sampling = (
                SessionLimits(max_tokens=9, lifetime=1e9),
                SessionSampling(defaults={"top_p": 0.5}, max_tokens=3),
            )
            session, key = table.open("u", limits=limits, sampling=sampling, metadata={"a": [1]})
            await before.opened(session)
            await lived(before, session, calls)
            await before.rewarded(session, "reward", 0.5)
            after, later = JournalRecorder(journal), SessionTable()
            assert await GatewayRecovery(journal, after).into(later) == 1
            same_session(later.by_key(key), session)
            same_record(after, before, session.session_id)
            await closed_alike(journal, after, later.by_key(key), calls)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(case(Path(folder)))


def same_session(now: Session, then: Session) -> None:
    assert (now.view(), now.requests) == (then.view(), then.requests)
    assert (now.limits, now.sampling, now.deadline) == (then.limits, then.sampling, then.deadline)


def same_record(after: JournalRecorder, before: JournalRecorder, session_id: str) -> None:
    now, then = after.record(session_id), before.record(session_id)
    assert now.rewards == then.rewards and now.is_open
    assert [told_turn(turn) for turn in now.turns] == [told_turn(turn) for turn in then.turns]
    running = {name: told(segments) for name, segments in before._running.items()}
    assert {name: told(segments) for name, segments in after._running.items()} == running
    now.check_integrity()


def told_turn(turn: Any) -> tuple[Any, ...]:
    segments = [node.segment for node in turn.generated_nodes()]
    return turn.turn_id, turn.prompt_ids(), told(segments), turn.finish, turn.request, turn.reply


async def closed_alike(journal: SqliteJournal, after: JournalRecorder, session: Session, calls: list[Any]) -> None:
    """Attempts are offered as they stand; then the session ends, and nothing is lost or stays without an end."""
    for number, (_, finish) in enumerate(calls):
        offered = session.attempts.repeated(f"d{number + 1}", key=f"k{number}", retry=False)
        assert (offered is not None) == (finish not in (Finish.CANCELLED, Finish.FAILED))
        assert offered is None or (bool(offered.cuts), offered.number) == (finish is None, number + 1)
    await after.closed(session, "finished")
    record, left = after.take(session.session_id), journal.read(session.session_id)
    assert left is not None and left.stage is Stage.CLOSED and not any(call.cut for call in left.calls)
    assert record.tree.generated == session.tokens == closed_session(journal, session.session_id).tree.generated
    ends = {turn.turn_id: turn.finish for turn in record.turns}
    assert [ends[call.call_id] for call in left.calls] == [finish or Finish.CANCELLED for _, finish in calls]


@asynccontextmanager
async def at_work(folder: Path) -> AsyncIterator[tuple[SqliteJournal, JournalRecorder, Session]]:
    """A recorder with an open session."""
    with SqliteJournal(folder / "journal.sqlite") as journal:
        recorder, (session, _) = JournalRecorder(journal), SessionTable().open("u")
        await recorder.opened(session)
        yield journal, recorder, session


def test_a_piece_on_its_way_to_the_journal_is_kept_when_its_call_is_cancelled(tmp_path: Path) -> None:
    async def case() -> None:
        async with at_work(tmp_path) as (journal, recorder, session):
            call = call_of(session, [1])
            await recorder.started(call)
            writing = asyncio.create_task(recorder.piece(call, piece([5, 6])))
            await asyncio.sleep(0)
            writing.cancel()
            await asyncio.wait([writing])
            await recorder.ended(call, Finish.CANCELLED, {})
            kept, left = recorder.record(session.session_id), journal.read(session.session_id)
            assert left is not None and writing.cancelled()
            assert kept.turns[0].generated_ids() == left.calls[0].turn().generated_ids == tokens([5, 6])

    asyncio.run(case())


def calls_of(journal: SqliteJournal, session: Session) -> Sequence[StoredCall]:
    left = journal.read(session.session_id)
    assert left is not None
    return left.calls


def test_what_nobody_waits_for_is_journalled_soon_and_a_call_without_tokens_not_at_all(tmp_path: Path) -> None:
    async def case() -> None:
        async with at_work(tmp_path) as (journal, recorder, session):
            silent, speaking = call_of(session, [1]), call_of(session, [1, 2])
            for call in (silent, speaking):
                await recorder.started(call)
            recorder.noted(speaking, piece([5]))
            recorder.noted(speaking, piece([6], version=1))
            await until(lambda: bool(calls_of(journal, session)))
            (kept,) = calls_of(journal, session)
            assert (kept.call_id, [list(one.ids) for one in kept.segments]) == (speaking.call_id, [[5], [6]])
            await recorder.ended(speaking, Finish.CANCELLED, {})
            await recorder.ended(silent, Finish.CANCELLED, {})
            assert [turn.turn_id for turn in recorder.record(session.session_id).turns] == [
                speaking.call_id,
                silent.call_id,
            ]

    asyncio.run(case())


def test_a_call_hears_that_its_tokens_could_not_be_journalled(tmp_path: Path) -> None:
    async def case() -> None:
        async with at_work(tmp_path) as (journal, recorder, session):
            call = call_of(session, [1])
            await recorder.started(call)
            recorder.noted(call, piece([5]))
            journal.close()
            with pytest.raises(JournalError, match="it is closed"):
                while True:  # as soon as the first one is to be told
                    recorder.noted(call, piece([6]))
                    await asyncio.sleep(0)
            with pytest.raises(JournalError, match="it is closed"):
                await recorder.ended(call, Finish.STOP, {})

    asyncio.run(case())


def test_a_retry_is_taken_for_the_call_that_was_cut_before_one_that_ended() -> None:
    calls = [record_of(number, finish) for number, finish in ((1, Finish.STOP), (2, None), (3, Finish.STOP))]
    found: list[Attempt | None] = []

    async def case() -> None:
        attempts = Attempts()
        for one in attempts_of(calls):
            attempts.restore(one)
        found.extend(attempts.repeated("d", key=None, retry=True) for _ in range(4))

    asyncio.run(case())
    assert [one and one.number for one in found] == [2, 1, 3, None]


def test_what_was_cut_is_never_forgotten_and_of_the_rest_the_latest_are_known() -> None:
    calls = [record_of(number, None if number < 3 else Finish.STOP) for number in range(1, 3 * KEPT)]
    assert [one.number for one in attempts_of(calls)] == [1, 2, *range(2 * KEPT, 3 * KEPT)]


def record_of(number: int, finish: Finish | None) -> StoredCall:
    own = {"gateway": {"attempt": number, "place": 0, "max_tokens": 9}}
    return StoredCall(f"s.{number}", "d", tokens([1]), (), finish, own, {})
