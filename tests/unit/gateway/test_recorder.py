"""What waits for nobody is told in one append a call at a time, and what became of it is heard."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from seamless_verl.errors import JournalOrderError
from seamless_verl.gateway.recorder import NOTED_S, JournalBuffer
from seamless_verl.journal import CallEnded, CallStarted, Delta, Event
from seamless_verl.trajectory.records import Finish, logprobs, tokens


class Slow:
    """A journal whose appends are answered when the test says so."""

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


def token(call_id: str, number: int) -> Delta:
    return Delta(call_id, tokens([number]), logprobs([-1.0]), 0, "r")


async def told(journal: Slow, number: int) -> None:
    async with asyncio.timeout(10):
        while len(journal.appends) < number:  # noqa: ASYNC110 a stub tells nobody
            await asyncio.sleep(0.001)


def test_a_call_has_one_append_on_its_way_however_slow_the_journal_is() -> None:
    async def case() -> None:
        untold = JournalBuffer(journal := Slow())
        untold.begin(start("a"))
        for number in range(5):
            untold.note(token("a", number))
            await asyncio.sleep(1.5 * NOTED_S)
        assert journal.counts[0] == 2 and len(journal.appends) == 1
        journal.appends[0][1].set_result(None)
        await told(journal, 2)
        assert journal.counts == [2, 4]
        ending = asyncio.ensure_future(untold.append("a", CallEnded("a", Finish.STOP, {})))
        journal.appends[2][1].set_result(None)
        await asyncio.sleep(0)
        assert not ending.done(), "its tokens are not in the journal yet"
        journal.appends[1][1].set_result(None)
        await ending

    asyncio.run(case())


def test_calls_are_told_of_each_by_itself_and_at_once() -> None:
    async def case() -> None:
        untold = JournalBuffer(journal := Slow())
        for name in "ab":
            untold.begin(start(name))
            untold.note(token(name, 1))
        untold.begin(start("c"))
        await told(journal, 2)
        await asyncio.sleep(1.5 * NOTED_S)
        assert [events[0].call_id for events, _ in journal.appends] == ["a", "b"], "a call has no tokens yet"

    asyncio.run(case())


@pytest.mark.parametrize("more", [True, False], ids=["another piece", "the end"])
def test_an_append_that_is_refused_later_is_heard_of(more: bool) -> None:
    async def case() -> None:
        untold = JournalBuffer(journal := Slow())
        untold.begin(start("a"))
        untold.note(token("a", 1))
        await told(journal, 1)
        journal.appends[0][1].set_exception(JournalOrderError("starting", "a", "no such session"))
        await asyncio.sleep(0)
        with pytest.raises(JournalOrderError, match="no such session"):
            if more:
                untold.note(token("a", 2))
            else:
                ending: Any = untold.append("a", CallEnded("a", Finish.STOP, {}))
                journal.appends[1][1].set_result(None)
                await ending

    asyncio.run(case())
