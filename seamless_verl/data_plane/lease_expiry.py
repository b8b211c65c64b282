"""Ends leases, and the time that a task may wait for a runner, at their deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from seamless_verl.data_plane.lease_book import EndedLease, LeaseBook
from seamless_verl.runtime.awake_time import AwakeTime


class LeaseExpiry:
    """A task that waits for the next deadline of the book; `ended` does what follows from those that are over.

    `now` is the clock of the book, by default one that stands still while this process cannot hear the runners.
    `on_failure` gets the error that ends the task.
    """

    def __init__(
        self,
        leases: LeaseBook,
        ended: Callable[[Sequence[EndedLease]], Awaitable[None]],
        *,
        now: Callable[[], float] | None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._leases, self._ended, self._on_failure = leases, ended, on_failure
        self._awake = AwakeTime()
        self.now = now or self._awake
        self.sooner = asyncio.Event()
        self._until: float | None = None  # when it looks next
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._awake.run(), name="clock of leases"),
            asyncio.create_task(self._expire(), name="expiry of leases"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def stop(self) -> None:
        """Ends it; nothing expires any more."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def wake(self) -> None:
        """Has it look again if a deadline is sooner than the one that it waits for."""
        deadline = self._leases.next_deadline()
        if deadline is not None and (self._until is None or deadline < self._until):
            self.sooner.set()

    async def _expire(self) -> None:
        while True:
            if expired := self._leases.expire(self.now()):
                await self._ended(expired)
            self.sooner.clear()
            self._until = self._leases.next_deadline()
            try:
                async with asyncio.timeout(None if self._until is None else max(0.0, self._until - self.now())):
                    await self.sooner.wait()
            except TimeoutError:
                pass  # it is the time of a deadline

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)
