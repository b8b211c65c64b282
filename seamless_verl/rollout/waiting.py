"""Calls that wait for a slot, oldest call first.

Invariant: a waiter stands in line until it is granted a lease or goes away; a lease granted to one that
goes away at the same moment is given back.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from seamless_verl.rollout.replica import Lease


@dataclass(eq=False)
class Waiter:
    """A call in line; `ticket` is its age among all calls, kept over its cuts."""

    ticket: int
    key: str
    granted: asyncio.Future[Lease]


class Line:
    """The calls in line."""

    def __init__(self) -> None:
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

    def serve(self, grant: Callable[[str], Lease | None]) -> None:
        """Grants leases from the head of the line until there are no more."""
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.granted.done():
                if (lease := grant(waiter.key)) is None:
                    return
                waiter.granted.set_result(lease)
            self._waiters.remove(waiter)
