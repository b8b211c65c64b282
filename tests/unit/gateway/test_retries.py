"""Tapes and attempts: what a retry reads is what the first attempt gave, and only a marked retry reads it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.gateway.request_context import digest_of
from seamless_verl.gateway.retries import KEPT, Attempt, Attempts, CallOutput
from seamless_verl.rollout.call import Call, Piece
from seamless_verl.rollout.engine import TopLogprobs
from seamless_verl.trajectory.records import Finish, logprobs, tokens

CALL = Call("c", tokens([1]), {})


def piece(ids: list[int], version: int = 0, finish: Finish | None = None, top: bool = False) -> Piece:
    tops = tuple(TopLogprobs((token,), (-1.0,), 1) for token in ids) if top else None
    return Piece(tokens(ids), logprobs([-float(i) for i in ids]), version, "r", finish, "why" if finish else None, tops)


async def read(tape: CallOutput) -> list[Piece]:
    return [one async for one in tape.stream(CALL)]


def spelled(pieces: list[Piece]) -> list[tuple[int, float, int]]:
    return [(i, p, one.version) for one in pieces for i, p in zip(one.ids, one.logprobs, strict=True)]


PIECES = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.integers(0, 2)), max_size=12)


@given(PIECES, st.integers(0, 12), st.booleans())
def test_a_follower_reads_all_of_it_whenever_it_joins(given_: list[Any], joined: int, top: bool) -> None:
    written = [piece(ids, version, top=top) for ids, version in given_]

    async def case() -> None:
        tape, reader = CallOutput(), None
        for number, one in enumerate(written):
            if number == joined:
                reader = asyncio.create_task(read(tape))
            tape.add(one)
            await asyncio.sleep(0)
        tape.add(piece([7], 3, Finish.STOP, top=top))
        got = await (reader or asyncio.create_task(read(tape)))
        assert spelled(got) == [*spelled(written), (7, -7.0, 3)]
        assert [one.finish for one in got][-1] is Finish.STOP and got[-1].stop_reason == "why"
        assert not any(one.finish for one in got[:-1])
        if top:
            assert [position.ids[0] for one in got for position in one.top or ()] == [i for i, *_ in spelled(got)]

    asyncio.run(case())


def test_a_tape_that_breaks_off_ends_its_followers() -> None:
    async def case() -> None:
        tape, left = CallOutput(), []
        tape.abandoned = lambda: left.append(True)
        tape.add(piece([1]))
        reader = asyncio.create_task(read(tape))
        await asyncio.sleep(0)
        assert tape.followers == 1
        tape.break_off()
        assert [one.finish for one in await reader] == [None, Finish.FAILED]
        assert tape.followers == 0 and left == [True]

    asyncio.run(case())


def begun(attempts: Attempts, digest: str = "d", key: str | None = None, ended: bool = True) -> Attempt:
    attempt = attempts.begin(digest, key)
    attempt.tapes[0] = CallOutput()
    if ended:
        attempt.tapes[0].add(piece([1], finish=Finish.STOP))
    return attempt


def in_a_loop(case: Any) -> None:
    async def run() -> None:
        case()

    asyncio.run(run())


def test_only_a_marked_repetition_is_one() -> None:
    def case() -> None:
        attempts = Attempts()
        first = begun(attempts)
        assert attempts.repeated("d", key=None, retry=False) is None
        assert attempts.repeated("other", key=None, retry=True) is None
        assert attempts.repeated("d", key=None, retry=True) is first
        assert attempts.repeated("d", key=None, retry=True) is None  # another retry is another request's

    in_a_loop(case)


def test_two_equal_requests_have_a_retry_each() -> None:
    def case() -> None:
        attempts = Attempts()
        pair = [begun(attempts), begun(attempts)]
        assert [attempts.repeated("d", key=None, retry=True) for _ in pair] == pair

    in_a_loop(case)


def test_what_was_sent_in_full_or_broke_off_is_not_repeated() -> None:
    def case() -> None:
        attempts = Attempts()
        attempts.sent(begun(attempts))
        begun(attempts, ended=False).tapes[0].break_off()
        assert attempts.repeated("d", key=None, retry=True) is None

    in_a_loop(case)


def test_an_idempotency_key_is_one_requests_for_as_long_as_it_is_known() -> None:
    def case() -> None:
        attempts = Attempts()
        first = begun(attempts, key="k")
        attempts.sent(first)
        assert attempts.repeated("d", key="k", retry=False) is first
        with pytest.raises(ApiError) as caught:
            attempts.repeated("other", key="k", retry=False)
        assert caught.value.reason is ErrorCode.REUSED_KEY

    in_a_loop(case)


def test_what_runs_is_never_forgotten_and_the_rest_is_bounded() -> None:
    def case() -> None:
        attempts = Attempts()
        running = begun(attempts, "running", ended=False)
        for number in range(3 * KEPT):
            begun(attempts, str(number))
        assert len(attempts) <= KEPT
        assert attempts.repeated("running", key=None, retry=True) is running

    in_a_loop(case)


def test_a_digest_is_of_the_content_not_of_its_writing() -> None:
    assert digest_of("/p", {"a": 1, "b": [2, "é"]}) == digest_of("/p", {"b": [2, "é"], "a": 1})
    different = [digest_of("/p", {"a": 1}), digest_of("/q", {"a": 1}), digest_of("/p", {"a": "1"})]
    assert len(set(different)) == 3
