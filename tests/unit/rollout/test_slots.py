"""The queue beside a plain one that passes over all waiting calls at every slot: the same calls get the same slots."""

from __future__ import annotations

import asyncio
from itertools import chain
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.rollout.precedence import Precedence
from seamless_verl.rollout.slots import Slots

OVERTAKING = 3
ROOMS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2))  # slots by replica
CALL = st.tuples(st.just("call"), st.sampled_from("abc"), st.integers(0, 2), st.sampled_from(["", "p", "q"]))
FORESEEN = st.tuples(st.just("foresee"), st.sampled_from("pq"), st.integers(-2, 2))
STEPS = st.lists(
    st.one_of(CALL, CALL, FORESEEN, st.tuples(st.just("leave"), st.integers(0, 9)), st.tuples(st.just("grant"), ROOMS)),
    min_size=15,
    max_size=60,
)


class Queue(Slots):
    """Slots of replicas that have room only within `grant`, as much as that says; `taken` are the keys that got one."""

    def __init__(self) -> None:
        super().__init__({}, OVERTAKING)
        self.rooms, self.taken = dict[str, int](), list[str]()
        self._policy: Any = SimpleNamespace(preferred=lambda view: lambda key: key[0])

    def grant(self, rooms: dict[str, int]) -> list[str]:
        self.rooms, self.taken = rooms, []
        self.grant_waiting()
        self.rooms = {}
        return self.taken

    def _has_slot(self) -> bool:
        return any(self.rooms.values())

    def _fits(self, replica_id: str | None) -> bool:
        return self.rooms.get(replica_id or "", 0) > 0

    def _grant(self, key: str) -> Any:
        if not take(self.rooms, key):
            return None
        self.taken.append(key)
        return SimpleNamespace(release=lambda: None)


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
    queue, plain, tasks = Queue(), PlainQueue(), dict[str, asyncio.Task[Any]]()
    for number, (kind, *given_values) in enumerate(steps):
        if kind == "call":
            replica, version, prompt = given_values
            key, place = f"{replica}{number}", Precedence(version, bool(prompt), 0, number)
            tasks[key] = asyncio.create_task(queue.acquire(key, place, prompt))
            plain.add(key, place, prompt)
        elif kind == "foresee":
            queue.foresee(*given_values)
            plain.foresee(*given_values)
        elif kind == "leave" and plain.waiting:
            *_, key, _ = plain.waiting.pop(given_values[0] % len(plain.waiting))
            tasks.pop(key).cancel()
        elif kind == "grant":
            assert queue.grant(dict(given_values[0])) == plain.grant(dict(given_values[0]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        keys = [waiter.key for waiter in queue._waiters if not waiter.granted.done()]
        assert keys == [waiter[2] for waiter in plain.waiting] and queue.waiting == len(plain.waiting)
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert queue.waiting == 0 and not queue._overdue and not queue._beginning


@settings(deadline=None, max_examples=300)
@given(STEPS)
def test_the_same_calls_get_the_same_slots(steps: list[Any]) -> None:
    steps = [step for step in steps if step[0] != "grant" or any(step[1].values())]
    asyncio.run(compare(steps))
