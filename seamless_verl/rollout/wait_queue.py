"""Calls that wait for a slot.

Invariants:
- A waiter stands in line until it is granted a lease or goes away; a lease granted to one that goes away at the same
  moment is given back.
- A slot goes to the oldest call whose home (routing.py) is there, else to the oldest; but where more than `overtaking`
  calls have come since a call stood in line, it goes to that one.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from seamless_verl.rollout.replica import Lease


@dataclass(eq=False)
class Waiter:
    """A call in line, the `came`th that stood there; `ticket` is its age."""

    ticket: int
    came: int
    key: str
    granted: asyncio.Future[Lease]

    def offer(self, grant: Callable[[str], Lease | None]) -> bool:
        """Takes a lease if it is granted one, unless it has one or has gone; whether it did."""
        if self.granted.done() or (lease := grant(self.key)) is None:
            return False
        self.granted.set_result(lease)
        return True


class WaitQueue:
    """The calls in line."""

    def __init__(self, overtaking: int) -> None:
        self._overtaking = overtaking
        self._come = 0
        self._waiters: list[Waiter] = []

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def keys(self) -> list[str]:
        """Of those in line, in order of age."""
        return [waiter.key for waiter in self._waiters if not waiter.granted.done()]

    async def wait(self, key: str, ticket: int) -> Lease:
        """The lease that `serve` grants."""
        self._come += 1
        waiter = Waiter(ticket, self._come, key, asyncio.get_running_loop().create_future())
        insort(self._waiters, waiter, key=lambda other: other.ticket)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._waiters = [other for other in self._waiters if other is not waiter]
            else:
                waiter.granted.result().release()
            raise

    def serve(
        self, grant: Callable[[str], Lease | None], at_home: Callable[[str], bool], has_room: Callable[[], bool]
    ) -> None:
        """Grants leases while there is room, as there is now; `at_home` tells whether there is some in a key's home,
        `grant` refuses a key whose calls are to wait all the same."""
        passed = [one for one in self._waiters if one.came < self._come - self._overtaking]
        at_home_next = (one for one in self._waiters if at_home(one.key))  # as it is by then
        for waiter in chain(sorted(passed, key=lambda one: one.came), at_home_next, self._waiters):
            if waiter.offer(grant) and not has_room():
                break
        self._waiters = [waiter for waiter in self._waiters if not waiter.granted.done()]
