"""An agent that begins again gets what is on record, each call once, and nothing that its session may not have."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.routes import marks, rows_of

from seamless_verl.gateway.calls import (
    ASKED,
    RecordedCall,
    RecordedSource,
    RepeatableCalls,
    SessionCall,
    asked_digest,
)
from seamless_verl.journal import Stage, StoredCall, StoredSession
from seamless_verl.trajectory.images import GATEWAY_KEY
from seamless_verl.trajectory.records import Finish, Segment, TokenChunk, logprobs, tokens


def segment(version: int, *ids: int) -> Segment:
    return Segment(tokens(ids), logprobs([-float(i) for i in ids]), version, f"replica-{version}")


def stored(
    *segments: Segment, finish: Finish | None = Finish.STOP, asked: str | None = "q", **reply: Any
) -> StoredCall:
    own = {} if asked is None else {ASKED: asked}
    return StoredCall("c", "", tokens([1]), segments, finish, {GATEWAY_KEY: own}, reply)


def session(*calls: StoredCall) -> StoredSession:
    return StoredSession("s", "u", {}, 0.0, Stage.HANDED, "abandoned", calls, {})


def repeatable(*sessions: StoredSession, counts: Counter[str] | None = None) -> RepeatableCalls:
    bounded = [(one, None) for one in sessions]
    return RepeatableCalls(bounded, oldest=0, counts=Counter() if counts is None else counts)


def asks(name: str, **sampling: Any) -> SessionCall:
    return SessionCall("new", tokens([1]), {"max_tokens": 5, "logprobs": 0, **sampling}, asked=name)


TWO = (segment(3, 5, 6), segment(4, 7))


@pytest.mark.parametrize(
    ("call", "bounds", "given", "finish"),
    [
        (stored(*TWO), (3, None), [[5, 6], [7]], Finish.STOP),
        (stored(*TWO, finish=Finish.TOOL_CALLS), (0, 4), [[5, 6], [7]], Finish.STOP),
        (stored(*TWO, finish=Finish.LENGTH), (3, 4), [[5, 6], [7]], Finish.LENGTH),
        (stored(*TWO), (0, 3), [[5, 6]], None),  # what newer weights added is generated anew
        (stored(*TWO, finish=Finish.CANCELLED, interrupted=True), (3, None), [[5, 6], [7]], None),
    ],
)
def test_what_may_be_given_of_a_call(
    call: StoredCall, bounds: tuple[int, int | None], given: list[list[int]], finish: Finish | None
) -> None:
    recorded = RecordedCall.of(call, *bounds)
    assert recorded is not None and recorded.finish is finish
    assert [list(one.ids) for one in recorded.segments] == given and len(recorded) == sum(map(len, given))


@pytest.mark.parametrize(
    ("call", "bounds"),
    [
        (stored(*TWO), (4, None)),  # its first tokens are too old
        (stored(*TWO), (0, 2)),  # all of it is of newer weights
        (stored(*TWO, finish=Finish.CANCELLED), (0, None)),  # by its agent, perhaps since it was long
        (stored(*TWO, finish=Finish.FAILED), (0, None)),
        (stored(*TWO, finish=None), (0, None)),  # it still runs, or its worker died: as if its agent had cancelled it
        (stored(finish=Finish.CANCELLED, interrupted=True), (0, None)),
    ],
)
def test_what_is_not_given(call: StoredCall, bounds: tuple[int, int | None]) -> None:
    assert RecordedCall.of(call, *bounds) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4))), st.lists(st.sampled_from("abcd")))
def test_each_call_is_given_once_in_the_order_of_the_record(recorded: list[tuple[str, int]], asked: list[str]) -> None:
    """Whatever an agent asks: the n-th call that asks one thing gets the n-th recorded one."""
    counts: Counter[str] = Counter()
    calls = repeatable(
        session(*(stored(segment(number, *range(size)), asked=name) for number, (name, size) in enumerate(recorded))),
        counts=counts,
    )
    expected: defaultdict[str, list[int]] = defaultdict(list)
    for number, (name, _) in enumerate(recorded):
        expected[name].append(number)
    given = []
    for name in asked:
        found, wanted = calls.take(asks(name)), expected[name].pop(0) if expected[name] else None
        assert (None if found is None else found.segments[0].version) == wanted
        given += [] if found is None else [found]
    assert counts["calls"] == len(given) and counts["tokens"] == sum(map(len, given))
    assert len(calls) == len(recorded) - len(given)


def test_what_is_not_on_record_is_asked_of_an_engine() -> None:
    """The likeliest tokens beside each, and the state of a grammar within a call."""
    grammar = {"structured_outputs": {"choice": ["a"]}}
    for recorded, sampling, whether in (
        (stored(*TWO), {}, True),
        (stored(*TWO), {"logprobs": 2}, False),
        (stored(*TWO), grammar, True),
        (stored(*TWO, finish=Finish.CANCELLED, interrupted=True), grammar, False),
    ):
        counts: Counter[str] = Counter()
        assert (repeatable(session(recorded), counts=counts).take(asks("q", **sampling)) is not None) is whether
        assert counts["calls"] == whether


def test_what_the_lost_session_had_not_repeated_itself_is_given_too() -> None:
    """Of three calls of the first session the second has one again, and one that was generated anew."""
    first = session(*(stored(segment(1, number), asked="same") for number in range(3)), stored(*TWO, asked="other"))
    second = session(stored(segment(1, 0), asked="same"), stored(segment(2, 8), asked="same"))
    calls = repeatable(second, first)
    given = [calls.take(asks("same")) for _ in range(4)]
    assert [one and list(one.segments[0].ids) for one in given] == [[0], [8], [2], None]
    assert calls.take(asks("other")) is not None


def test_a_call_that_was_repeated_is_not_given_again_where_one_before_it_failed() -> None:
    first = session(stored(*TWO, finish=Finish.FAILED), stored(segment(1, 7)))
    calls = repeatable(session(stored(segment(1, 7))), first)
    assert calls.take(asks("q")) is not None and calls.take(asks("q")) is None


def test_equal_questions_and_others() -> None:
    prompt, sampling = tokens([1, 2]), {"max_tokens": 5, "temperature": 1.0}
    one = asked_digest(prompt, sampling, [])
    assert one == asked_digest(tokens([1, 2]), {"temperature": 1.0, "max_tokens": 5}, ())
    others = [
        asked_digest(tokens([1, 2, 3]), sampling, []),
        asked_digest(prompt, sampling | {"max_tokens": 6}, []),
        asked_digest(prompt, sampling | {"structured_outputs": {"choice": ["\ud800"]}}, []),
        asked_digest(prompt, sampling, ["\n"]),
        asked_digest(prompt, sampling, [], choice=1),
    ]
    assert len({one, *others}) == 6


class Source:
    """Continues with the token 9, and remembers what the call had produced."""

    produced: Sequence[int] | None = None

    async def stream(self, call: SessionCall) -> AsyncGenerator[TokenChunk, None]:
        self.produced = list(call.produced)
        yield TokenChunk(tokens([9]), logprobs([-9.0]), 5, "new", Finish.STOP)


async def streamed(call: StoredCall, newest: int | None = None) -> tuple[list[tuple[Any, ...]], Sequence[int] | None]:
    recorded, source = RecordedCall.of(call, 0, newest), Source()
    assert recorded is not None
    chunks = RecordedSource(recorded, source).stream(SessionCall("new", tokens([1]), {"max_tokens": 5}))
    shown = [(list(one.ids), one.version, one.finish_reason, one.stop_reason) async for one in chunks]
    return shown, source.produced


async def test_the_tokens_come_as_an_engine_would_send_them() -> None:
    first, last = ([5, 6], 3, None, None), ([7], 4, Finish.STOP, None)
    assert await streamed(stored(*TWO)) == ([first, last], None)
    shown, _ = await streamed(stored(*TWO, stop_reason=7))
    assert shown == [first, ([7], 4, Finish.STOP, 7)]
    # The reader finds a stop string in the text, for which it needs the last token as any other, and reads no further.
    shown, produced = await streamed(stored(*TWO, stop_reason="END"))
    assert shown == [first, ([7], 4, None, None), ([9], 5, Finish.STOP, None)] and produced == [5, 6, 7]


async def test_a_call_without_an_end_is_continued() -> None:
    first, new = ([5, 6], 3, None, None), ([9], 5, Finish.STOP, None)
    assert await streamed(stored(*TWO, finish=Finish.CANCELLED, interrupted=True)) == (
        [first, ([7], 4, None, None), new],
        [5, 6, 7],
    )
    assert await streamed(stored(*TWO), newest=3) == ([first, new], [5, 6])


async def test_a_call_comes_with_its_routes_also_where_the_new_session_knows_less() -> None:
    """Of the lost session's two turns the second one's prompt has its routes from where the first one ended."""

    def made(name: str, prompt: list[int], *ids: int, known: int) -> StoredCall:
        routed = Segment(tokens(ids), logprobs([0.0] * len(ids)), 3, "r", routes=rows_of(*ids))
        own = {GATEWAY_KEY: {ASKED: name}}
        return StoredCall(name, "", tokens(prompt), (routed,), Finish.STOP, own, {}, rows_of(*prompt[known:]))

    calls = repeatable(session(made("one", [1, 2], 5, 6, known=1), made("two", [1, 2, 5, 6, 3, 4], 7, known=4)))
    asked = replace(asks("two"), prompt_ids=tokens([1, 2, 5, 6, 3, 4]), routes_from=2)
    recorded = calls.take(asked)
    assert recorded is not None
    (chunk,) = [chunk async for chunk in RecordedSource(recorded, Source()).stream(asked)]
    assert marks(chunk.routes) == [7] and marks(chunk.prompt_routes) == [5, 6, 3, 4]
    lacking = repeatable(session(stored(*TWO)))
    assert lacking.take(replace(asks("q"), routes_from=1)) is None, "it has none on record"
