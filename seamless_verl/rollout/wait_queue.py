"""The queue of calls that wait for a slot on a replica.

Invariants:
- A waiter stays in the queue until it is granted a slot or leaves. If it leaves at the moment of its grant, the
  slot is given back.
- A slot goes to the first call, by its place, whose preferred replica (routing.py) has room, else to the first of all.
  A call goes before both, after such calls of older prompts, once more than `overtaking` calls have entered the queue
  after it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from seamless_verl.rollout.precedence import Precedence
from seamless_verl.rollout.replica import Slot

PLACE, ARRIVAL = attrgetter("place"), attrgetter("arrival")
OVERDUE = attrgetter("place.version", "arrival")


@dataclass(eq=False)
class Waiter:
    """A waiting call: `arrival` counts the calls that entered the queue; calls of one `prompt` may be equally long."""

    place: Precedence
    arrival: int
    key: str
    prompt: str
    granted: asyncio.Future[Slot]
    overdue: bool = False

    def offer(self, grant: Callable[[str], Slot | None]) -> bool:
        """Takes a slot if `grant` gives one, unless it has one or has left; returns whether it took one."""
        if self.granted.done() or (slot := grant(self.key)) is None:
            return False
        self.granted.set_result(slot)
        return True


class WaitQueue:
    """The calls that wait, in order of their places.

    With a thousand prompts a step thousands of calls wait, and as many slots are given back. So a grant passes over
    waiting calls only until one prefers a replica with room, and nothing is sorted anew. `_waiters` is sorted by
    place; `_by_arrival` has the same in order of arrival, and some that have left; the overdue ones of them are in
    `_overdue` instead, sorted. `_beginning` has those of each named prompt.
    """

    def __init__(self, overtaking: int) -> None:
        self._overtaking = overtaking
        self._arrivals = 0
        self._waiters: list[Waiter] = []
        self._by_arrival = deque[Waiter]()
        self._overdue: list[Waiter] = []
        self._beginning = defaultdict[str, set[Waiter]](set)

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def keys(self) -> list[str]:
        """The keys of the waiting calls, in their order."""
        return [waiter.key for waiter in self._waiters if not waiter.granted.done()]

    async def wait(self, key: str, place: Precedence, prompt: str = "") -> Slot:
        """Waits in the queue; returns the slot that `grant_slots` grants."""
        self._arrivals += 1
        waiter = Waiter(place, self._arrivals, key, prompt, asyncio.get_running_loop().create_future())
        insort(self._waiters, waiter, key=PLACE)
        self._by_arrival.append(waiter)
        if prompt:
            self._beginning[prompt].add(waiter)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._remove(waiter)
            else:
                waiter.granted.result().release()
            raise

    def foresee(self, prompt: str, shortness: int) -> None:
        """Calls of this prompt are expected to be so short: those that wait are put in their new places."""
        for waiter in sorted(self._beginning.get(prompt, ()), key=ARRIVAL):
            del self._waiters[self._index(waiter)]
            waiter.place = waiter.place.expecting(shortness)
            insort(self._waiters, waiter, key=PLACE)

    def grant_slots(
        self, grant: Callable[[str], Slot | None], fits_preferred: Callable[[str], bool], has_room: Callable[[], bool]
    ) -> None:
        """Grants slots while there is room.

        `fits_preferred` says whether a key's preferred replica has room. `grant` returns None for a key whose calls
        must still wait.
        """
        preferred = (waiter for waiter in self._waiters if fits_preferred(waiter.key))  # evaluated as slots are taken
        granted = []
        self._find_overdue()
        try:
            for waiter in chain(self._overdue, preferred, self._waiters):
                if waiter.offer(grant):
                    granted.append(waiter)
                    if not has_room():
                        break
        finally:  # also if a later grant raises
            for waiter in granted:
                self._remove(waiter)

    def _find_overdue(self) -> None:
        """Moves those that more than `overtaking` later ones have come after."""
        while self._by_arrival and self._by_arrival[0].arrival < self._arrivals - self._overtaking:
            waiter = self._by_arrival.popleft()
            if not waiter.granted.done():
                insort(self._overdue, waiter, key=OVERDUE)
                waiter.overdue = True

    def _remove(self, waiter: Waiter) -> None:
        del self._waiters[self._index(waiter)]
        if waiter.overdue:
            del self._overdue[bisect_left(self._overdue, OVERDUE(waiter), key=OVERDUE)]
        if waiter.prompt:
            siblings = self._beginning[waiter.prompt]
            siblings.discard(waiter)
            if not siblings:
                del self._beginning[waiter.prompt]

    def _index(self, waiter: Waiter) -> int:
        return self._waiters.index(waiter, bisect_left(self._waiters, waiter.place, key=PLACE))
