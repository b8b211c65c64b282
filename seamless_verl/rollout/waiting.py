"""Calls that wait for a slot.

Invariants:
- A waiter stands in line until it is granted a lease or goes away; a lease granted to one that goes away at the same
  moment is given back.
- A slot goes to the oldest call that is at home there, else to the oldest; but a call goes before none that is older
  by more than `overtaking` calls.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from seamless_verl.rollout.replica import Lease


@dataclass(eq=False)
class Waiter:
    """A call in line; `ticket` is its age."""

    ticket: int
    key: str
    granted: asyncio.Future[Lease]

    def offer(self, grant: Callable[[str], Lease | None]) -> None:
        """Takes a lease if it is granted one, unless it has one or has gone."""
        if not self.granted.done() and (lease := grant(self.key)) is not None:
            self.granted.set_result(lease)


class Line:
    """The calls in line."""

    def __init__(self, overtaking: int) -> None:
        self._overtaking = overtaking
        self._waiters: list[Waiter] = []

    def __len__(self) -> int:
        return sum(not waiter.granted.done() for waiter in self._waiters)

    async def wait(self, key: str, ticket: int) -> Lease:
        """The lease that `serve` grants."""
        waiter = Waiter(ticket, key, asyncio.get_running_loop().create_future())
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
        """Grants leases until there are none; `at_home` tells whether there is one where a key's calls like to be,
        `grant` refuses a key whose calls are to wait all the same."""
        last = self._waiters[0].ticket + self._overtaking if self._waiters else 0
        for waiter in self._waiters:
            if has_room() and waiter.ticket <= last and at_home(waiter.key):
                waiter.offer(grant)
        for waiter in self._waiters:
            if has_room():
                waiter.offer(grant)
        self._waiters = [waiter for waiter in self._waiters if not waiter.granted.done()]
