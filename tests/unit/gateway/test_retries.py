"""Outputs and attempts: a retry reads what the first attempt produced, and only a marked retry does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.gateway.request_context import digest_of
from seamless_verl.gateway.retries import MAX_ATTEMPTS, MAX_FAILED, Attempt, Attempts, CallOutput, is_retried
from seamless_verl.rollout.call import Call
from seamless_verl.trajectory.records import Finish, TokenChunk, TopLogprobs, logprobs, tokens

CALL = Call("c", tokens([1]), {})


def make_chunk(ids: list[int], version: int = 0, finish: Finish | None = None, top: bool = False) -> TokenChunk:
    tops = tuple(TopLogprobs((token,), (-1.0,), 1) for token in ids) if top else None
    return TokenChunk(
        tokens(ids), logprobs([-float(i) for i in ids]), version, "r", finish, "why" if finish else None, tops
    )


async def read(output: CallOutput) -> list[TokenChunk]:
    return [one async for one in output.stream(CALL)]


def flatten(chunks: list[TokenChunk]) -> list[tuple[int, float, int]]:
    return [(i, p, one.version) for one in chunks for i, p in zip(one.ids, one.logprobs, strict=True)]


CHUNKS = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.integers(0, 2)), max_size=12)


@given(CHUNKS, st.integers(0, 12), st.booleans())
def test_a_reader_gets_all_tokens_whenever_it_joins(given_: list[Any], joined: int, top: bool) -> None:
    written = [make_chunk(ids, version, top=top) for ids, version in given_]

    async def case() -> None:
        output, reader = CallOutput(), None
        for number, one in enumerate(written):
            if number == joined:
                reader = asyncio.create_task(read(output))
            output.add(one)
            await asyncio.sleep(0)
        output.add(make_chunk([7], 3, Finish.STOP, top=top))
        got = await (reader or asyncio.create_task(read(output)))
        assert flatten(got) == [*flatten(written), (7, -7.0, 3)]
        assert [one.finish_reason for one in got][-1] is Finish.STOP and got[-1].stop_reason == "why"
        assert not any(one.finish_reason for one in got[:-1])
        if top:
            assert [position.ids[0] for one in got for position in one.top or ()] == [i for i, *_ in flatten(got)]

    asyncio.run(case())


@pytest.mark.parametrize("stop_reason", [None, 9, "stop"])
async def test_the_token_that_ended_a_call_comes_with_its_end(stop_reason: int | str | None) -> None:
    """A decoder leaves it out of the text; a stop string it finds there itself."""
    end = replace(make_chunk([8, 9], finish=Finish.STOP), stop_reason=stop_reason)
    live, whole = CallOutput(), CallOutput()
    live.add(make_chunk([1]))
    reader = asyncio.create_task(read(live))
    await asyncio.sleep(0)
    live.add(end)
    whole.add(replace(make_chunk([1, 8, 9], finish=Finish.STOP), stop_reason=stop_reason))
    for chunks, before in ((await reader, 1), (await read(whole), 0)):
        ends = [(chunk.ids.tolist(), chunk.finish_reason) for chunk in chunks][before:]
        ids = [8, 9] if before else [1, 8, 9]
        assert ends == ([(ids, None), ([], Finish.STOP)] if stop_reason == "stop" else [(ids, Finish.STOP)])
        assert chunks[-1].stop_reason == stop_reason


async def test_alternatives_stay_with_their_tokens_where_some_have_none() -> None:
    """As after a restart: recorded tokens have none, the new ones of the same segment do."""
    output = CallOutput()
    output.add(make_chunk([1, 2]))
    output.add(make_chunk([3], top=True))
    output.add(make_chunk([4], version=1))
    output.add(make_chunk([5], version=2, finish=Finish.STOP, top=True))
    chunks = await read(output)
    assert flatten(chunks) == [(1, -1.0, 0), (2, -2.0, 0), (3, -3.0, 0), (4, -4.0, 1), (5, -5.0, 2)]
    assert [chunk.top and [entry.ids for entry in chunk.top] for chunk in chunks] == [None, None, [(5,)], None]


async def test_an_output_that_fails_ends_its_readers() -> None:
    output, left = CallOutput(), list[bool]()
    output.on_last_reader_left = lambda: left.append(True)
    output.add(make_chunk([1]))
    reader = asyncio.create_task(read(output))
    await asyncio.sleep(0)
    assert output.readers == 1
    output.fail()
    assert [one.finish_reason for one in await reader] == [None, Finish.FAILED]
    assert output.readers == 0 and left == [True]


def begin(attempts: Attempts, digest: str = "d", key: str | None = None, ended: bool = True) -> Attempt:
    attempts.add(attempt := Attempt(digest, key))
    attempt.outputs[0] = CallOutput()
    if ended:
        attempt.outputs[0].add(make_chunk([1], finish=Finish.STOP))
    return attempt


async def test_only_a_marked_repetition_is_one() -> None:
    attempts = Attempts()
    first = begin(attempts)
    assert attempts.find("d", key=None, retry=False) is None
    assert attempts.find("other", key=None, retry=True) is None
    assert attempts.find("d", key=None, retry=True) is first
    assert attempts.find("d", key=None, retry=True) is None  # another retry is another request's


async def test_two_equal_requests_have_a_retry_each() -> None:
    attempts = Attempts()
    pair = [begin(attempts), begin(attempts)]
    assert [attempts.find("d", key=None, retry=True) for _ in pair] == pair


async def test_an_attempt_that_was_sent_in_full_or_failed_is_not_repeated() -> None:
    attempts = Attempts()
    attempts.mark_sent(begin(attempts))
    begin(attempts, ended=False).outputs[0].fail()
    assert attempts.find("d", key=None, retry=True) is None


async def test_the_retry_of_a_request_that_was_refused_gets_no_other_requests_reply() -> None:
    attempts = Attempts()
    running = [begin(attempts, ended=False) for _ in range(4)]
    for _ in range(3):
        attempts.note_failed("d")
    attempts.note_failed("other")
    found = [attempts.find("d", key=None, retry=retry) for retry in (True, False, True, False, True)]
    assert found == [None] * 5
    assert attempts.find("d", key=None, retry=True) is running[0], "all that were refused have come again"


async def test_a_retry_that_comes_before_its_failed_request_has_ended_is_counted_once() -> None:
    attempts = Attempts()
    failing, running = begin(attempts, ended=False), begin(attempts, ended=False)
    failing.outputs[0].fail()
    assert attempts.find("d", key=None, retry=True) is None
    assert not attempts.remove(failing), "so that nobody counts it again"
    assert attempts.find("d", key=None, retry=True) is running


def test_what_is_kept_of_failed_requests_is_bounded() -> None:
    attempts = Attempts()
    for number in range(3 * MAX_FAILED):
        attempts.note_failed(str(number))
    assert len(attempts._failed) == MAX_FAILED


def test_the_sdks_repeat_what_may_go_well_the_next_time() -> None:
    statuses: list[int | None] = [None, 408, 409, 429, 500, 503, 200, 400, 401, 403, 404, 410, 422]
    assert [is_retried(status) for status in statuses] == [True] * 6 + [False] * 7


async def test_an_idempotency_key_belongs_to_one_request() -> None:
    attempts = Attempts()
    first = begin(attempts, key="k")
    attempts.mark_sent(first)
    assert attempts.find("d", key="k", retry=False) is first
    with pytest.raises(ApiError) as caught:
        attempts.find("other", key="k", retry=False)
    assert caught.value.code is ErrorCode.REUSED_KEY


async def test_running_attempts_are_never_forgotten_and_the_others_are_bounded() -> None:
    attempts = Attempts()
    running = begin(attempts, "running", ended=False)
    for number in range(3 * MAX_ATTEMPTS):
        begin(attempts, str(number))
    assert len(attempts) <= MAX_ATTEMPTS
    assert attempts.find("running", key=None, retry=True) is running


async def test_attempts_whose_prompts_are_still_rendered_are_not_forgotten() -> None:
    attempts = Attempts()
    rendered = [Attempt(str(number), None, requests=1) for number in range(2 * MAX_ATTEMPTS)]
    for attempt in rendered:
        attempts.add(attempt)
    for attempt in rendered:  # as it ends
        attempt.outputs[0], attempt.requests = CallOutput(), 0
        attempt.outputs[0].add(make_chunk([1], finish=Finish.STOP))
        assert attempts.find(attempt.digest, key=None, retry=True) is attempt
    begin(attempts, "last")
    assert len(attempts) == 2 * MAX_ATTEMPTS, "of those that ended, the oldest goes for each new one"
    assert attempts.find("last", key=None, retry=True) is not None


def test_a_digest_is_of_the_content_not_of_its_writing() -> None:
    assert digest_of("/p", {"a": 1, "b": [2, "é"]}) == digest_of("/p", {"b": [2, "é"], "a": 1})
    different = [digest_of("/p", {"a": 1}), digest_of("/q", {"a": 1}), digest_of("/p", {"a": "1"})]
    assert len(set(different)) == 3
