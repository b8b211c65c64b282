"""The time limit of an agent, which counts its own time: not the seconds in which its calls waited for a replica, nor
those in which this process stood still, as one whose container is paused.

The seconds of calls are known only where the calls run, in a process that begins at 0 when it is started again. So they
are asked for a few times within the limit, and what was known by then is carried over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from seamless_verl.runtime.process import AwakeTime

PausedSeconds: TypeAlias = Callable[[], Awaitable[float]]
"""Seconds, so far, in which calls of the agent's session waited."""
ASKS = 8  # questions within a limit, if nothing waits
LEAST_WAIT_S = 0.25  # between two questions
BLOCKED_S = 60.0  # an agent that blocks its event loop for so long still uses its own time; what is longer is a stop


class PausedFigures:
    """The sum of seconds that a process counts, over the restarts of that process."""

    def __init__(self) -> None:
        self._last = self._lost = 0.0

    @property
    def total(self) -> float:
        return self._last + self._lost

    def add(self, found: float) -> None:
        """A figure of the process; one that is less than the last is of a process that began at 0."""
        if found < self._last:
            self._lost += self._last
        self._last = found


_clocks: dict[asyncio.AbstractEventLoop, tuple[AwakeTime, asyncio.Task[None]]] = {}
"""One for all agents of an event loop, with the task that it runs by, which ends with the loop."""


def clock_of_loop() -> AwakeTime:
    """The clock of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _clocks:
        for closed in [other for other in _clocks if other.is_closed()]:
            del _clocks[closed]
        clock = AwakeTime(late_s=BLOCKED_S)
        _clocks[loop] = clock, loop.create_task(clock.run(), name="clock of agents")
    return _clocks[loop][0]


class OwnTime:
    """The own time of one agent, from now on; without `paused` all of its time is its own."""

    def __init__(self, paused: PausedSeconds | None = None) -> None:
        self._clock, self._paused, self._figures = clock_of_loop(), paused, PausedFigures()
        self._began = self._clock()

    @property
    def paused_s(self) -> float:
        """Seconds that did not count, as last asked for."""
        return self._figures.total

    async def wait(self, work: asyncio.Future[Any], limit_s: float | None) -> None:
        """Return when the work is done, or the agent has used `limit_s` seconds of its own; None is no limit."""
        if limit_s is None:
            await asyncio.wait({work})
            return
        every_s = limit_s if self._paused is None else max(limit_s / ASKS, LEAST_WAIT_S)
        wait_s = min(limit_s, every_s)
        while not work.done():
            await asyncio.wait({work}, timeout=wait_s)
            await self._ask(work)
            remaining = limit_s - (self._clock() - self._began - self.paused_s)
            if remaining <= 0:
                return
            wait_s = max(min(remaining, every_s), LEAST_WAIT_S)

    async def _ask(self, work: asyncio.Future[Any]) -> None:
        """Asks for the seconds; the work's end ends the question, which may wait for a process that starts again."""
        if self._paused is None or work.done():
            return
        asking = asyncio.ensure_future(self._paused())
        try:
            await asyncio.wait({work, asking}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._figures.add(asking.result())
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
