"""The queue of calls that wait for a slot on a replica.

Invariants:
- A waiter stays in the queue until it is granted a lease or leaves. If it leaves at the moment of its grant, the
  lease is given back.
- A slot goes to the first call, by its place, whose preferred replica (routing.py) has room, else to the first of all.
  A call goes before both, after such calls of older prompts, once more than `overtaking` calls have entered the queue
  after it.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from seamless_verl.rollout.precedence import Precedence
from seamless_verl.rollout.replica import Lease

PLACE = attrgetter("place")


@dataclass(eq=False)
class Waiter:
    """A waiting call: `arrival` counts the calls that entered the queue; calls of one `prompt` may be equally long."""

    place: Precedence
    arrival: int
    key: str
    prompt: str
    granted: asyncio.Future[Lease]

    def offer(self, grant: Callable[[str], Lease | None]) -> bool:
        """Takes a lease if `grant` gives one, unless it has one or has left; returns whether it took one."""
        if self.granted.done() or (lease := grant(self.key)) is None:
            return False
        self.granted.set_result(lease)
        return True


class WaitQueue:
    """The calls that wait, in order of their places."""

    def __init__(self, overtaking: int) -> None:
        self._overtaking = overtaking
        self._arrivals = 0
        self._waiters: list[Waiter] = []

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def keys(self) -> list[str]:
        """The keys of the waiting calls, in their order."""
        return [waiter.key for waiter in self._waiters if not waiter.granted.done()]

    async def wait(self, key: str, place: Precedence, prompt: str = "") -> Lease:
        """Waits in the queue; returns the lease that `grant_slots` grants."""
        self._arrivals += 1
        waiter = Waiter(place, self._arrivals, key, prompt, asyncio.get_running_loop().create_future())
        insort(self._waiters, waiter, key=PLACE)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._waiters = [other for other in self._waiters if other is not waiter]
            else:
                waiter.granted.result().release()
            raise

    def foresee(self, prompt: str, shortness: int) -> None:
        """Calls of this prompt are expected to be so short: those that wait are put in their new places."""
        if siblings := [waiter for waiter in self._waiters if waiter.prompt == prompt]:
            for waiter in siblings:
                waiter.place = waiter.place.expecting(shortness)
            self._waiters.sort(key=PLACE)

    def grant_slots(
        self, grant: Callable[[str], Lease | None], fits_preferred: Callable[[str], bool], has_room: Callable[[], bool]
    ) -> None:
        """Grants leases while there is room.

        `fits_preferred` says whether a key's preferred replica has room. `grant` returns None for a key whose calls
        must still wait.
        """
        overdue = [waiter for waiter in self._waiters if waiter.arrival < self._arrivals - self._overtaking]
        preferred = (waiter for waiter in self._waiters if fits_preferred(waiter.key))  # evaluated as slots are taken
        overdue.sort(key=lambda waiter: (waiter.place.version, waiter.arrival))
        for waiter in chain(overdue, preferred, self._waiters):
            if waiter.offer(grant) and not has_room():
                break
        self._waiters = [waiter for waiter in self._waiters if not waiter.granted.done()]
