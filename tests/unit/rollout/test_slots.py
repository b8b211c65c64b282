"""The queue beside a plain one that passes over all waiting calls at every slot: the same calls get the same slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.rollout.precedence import Precedence
from seamless_verl.rollout.slots import WaitQueue

OVERTAKING = 3
ROOMS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2))  # slots by replica
CALL = st.tuples(st.just("call"), st.sampled_from("abc"), st.integers(0, 2), st.sampled_from(["", "p", "q"]))
FORESEEN = st.tuples(st.just("foresee"), st.sampled_from("pq"), st.integers(-2, 2))
STEPS = st.lists(
    st.one_of(CALL, CALL, FORESEEN, st.tuples(st.just("leave"), st.integers(0, 9)), st.tuples(st.just("grant"), ROOMS)),
    min_size=15,
    max_size=60,
)


class Slot:
    def release(self) -> None: ...


class PlainQueue:
    """What the queue does, by its invariants."""

    def __init__(self) -> None:
        self.arrivals, self.waiting = 0, list[list[Any]]()  # place, arrival, key, prompt

    def add(self, key: str, place: Precedence, prompt: str) -> None:
        self.arrivals += 1
        self.waiting.append([place, self.arrivals, key, prompt])
        self.waiting.sort(key=lambda waiter: waiter[0])

    def foresee(self, prompt: str, shortness: int) -> None:
        for waiter in self.waiting:
            if waiter[3] == prompt:
                waiter[0] = waiter[0].expecting(shortness)
        self.waiting.sort(key=lambda waiter: waiter[0])

    def grant(self, rooms: dict[str, int]) -> list[str]:
        late = [waiter for waiter in self.waiting if waiter[1] < self.arrivals - OVERTAKING]
        late.sort(key=lambda waiter: (waiter[0].version, waiter[1]))
        granted = list[list[Any]]()
        preferred = (waiter for waiter in self.waiting if rooms.get(waiter[2][0], 0) > 0)
        for waiter in chain(late, preferred, self.waiting):
            if waiter not in granted and take(rooms, waiter[2]):
                granted.append(waiter)
                if not any(rooms.values()):
                    break
        self.waiting = [waiter for waiter in self.waiting if waiter not in granted]
        return [waiter[2] for waiter in granted]


def take(rooms: dict[str, int], key: str) -> bool:
    """A slot of the replica that the key's first letter names, or of the first one that has room."""
    replica = next((name for name in (key[0], *sorted(rooms)) if rooms.get(name, 0) > 0), None)
    if replica is not None:
        rooms[replica] -= 1
    return replica is not None


async def compare(steps: list[Any]) -> None:
    queue, plain, tasks = WaitQueue(OVERTAKING), PlainQueue(), dict[str, asyncio.Task[Any]]()
    for number, (kind, *given_values) in enumerate(steps):
        if kind == "call":
            replica, version, prompt = given_values
            key, place = f"{replica}{number}", Precedence(version, bool(prompt), 0, number)
            tasks[key] = asyncio.create_task(queue.wait(key, place, prompt))
            plain.add(key, place, prompt)
        elif kind == "foresee":
            queue.foresee(*given_values)
            plain.foresee(*given_values)
        elif kind == "leave" and plain.waiting:
            *_, key, _ = plain.waiting.pop(given_values[0] % len(plain.waiting))
            tasks.pop(key).cancel()
        elif kind == "grant":
            assert granted(queue, dict(given_values[0])) == plain.grant(dict(given_values[0]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert queue.keys == [waiter[2] for waiter in plain.waiting] and len(queue) == len(plain.waiting)
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert len(queue) == 0 and not queue._overdue and not queue._beginning


def granted(queue: WaitQueue, rooms: dict[str, int]) -> list[str]:
    taken = list[str]()

    def grant(key: str) -> Any:
        if not take(rooms, key):
            return None
        taken.append(key)
        return Slot()

    if any(rooms.values()):
        queue.grant_slots(grant, lambda key: rooms.get(key[0], 0) > 0, lambda: any(rooms.values()))
    return taken


@settings(deadline=None, max_examples=300)
@given(STEPS)
def test_the_same_calls_get_the_same_slots(steps: list[Any]) -> None:
    steps = [step for step in steps if step[0] != "grant" or any(step[1].values())]
    asyncio.run(compare(steps))


async def test_a_grant_that_raises_leaves_no_granted_call_behind() -> None:
    queue, grants = WaitQueue(OVERTAKING), iter([Slot(), None])

    def grant(key: str) -> Any:
        if (slot := next(grants)) is None:
            raise AssertionError(key)
        return slot

    calls = [asyncio.create_task(queue.wait(f"a{number}", Precedence(0, False, 0, number))) for number in range(2)]
    await asyncio.sleep(0)
    always: Callable[..., bool] = lambda *_: True  # noqa: E731 - twice the same
    with pytest.raises(AssertionError):
        queue.grant_slots(grant, always, always)
    assert queue.keys == ["a1"] and len(queue) == 1
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
