"""The sessions of one prompt, run together and complete only together.

Invariants: every session has exactly one outcome once `run` is over, however it ends; one session's end
never ends another; at most as many run at once as `slots` lets through, across all groups that share it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from seamless_verl.agents.outcome import AgentOutcome, AgentStatus, told
from seamless_verl.errors import ConfigError, IntegrityError

Run = Callable[[int], Coroutine[Any, Any, AgentOutcome]]


class Group:
    """`sessions` runs of `run(index)`; what `run` raises becomes a FAILED outcome, a cancellation CANCELLED."""

    def __init__(self, run: Run, sessions: int, *, slots: asyncio.Semaphore) -> None:
        if sessions < 1:
            raise ConfigError("sessions", sessions, "a group needs at least one session", "Set it to 1 or more")
        self._run, self._sessions, self._slots = run, sessions, slots
        self._began: dict[int, float] = {}
        self._tasks: list[asyncio.Task[AgentOutcome]] = []
        self._cancelled = False
        self.outcomes: dict[int, AgentOutcome] = {}

    async def run(self) -> tuple[AgentOutcome, ...]:
        """All outcomes, by index, once every session has ended. Runs once.

        When the caller is cancelled all sessions are, their ends are awaited, and the cancellation is raised
        again: `outcomes` is complete then, too.
        """
        assert not self._tasks, "a group runs once"
        self._tasks = [asyncio.create_task(self._one(index)) for index in range(self._sessions)]
        for index, task in enumerate(self._tasks):
            task.add_done_callback(partial(self._settle, index))
        if self._cancelled:
            self.cancel()
        cancelled: asyncio.CancelledError | None = None
        while pending := [task for task in self._tasks if not task.done()]:
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError as error:
                cancelled = error
                self.cancel()
        for index, task in enumerate(self._tasks):
            self._settle(index, task)  # its callback may still stand in the loop's queue
        self.check_integrity()
        if cancelled is not None:
            raise cancelled
        return tuple(self.outcomes[index] for index in range(self._sessions))

    def cancel(self) -> None:
        """End all sessions that still run or wait; `run` then returns with CANCELLED for each of them."""
        self._cancelled = True
        for task in self._tasks:
            task.cancel()

    def check_integrity(self) -> None:
        """Sessions started = outcomes; raises IntegrityError."""
        if len(self.outcomes) != self._sessions:
            raise IntegrityError("sessions with an outcome", self._sessions, len(self.outcomes))

    async def _one(self, index: int) -> AgentOutcome:
        async with self._slots:
            self._began[index] = time.monotonic()
            return await self._run(index)

    def _settle(self, index: int, task: asyncio.Task[AgentOutcome]) -> None:
        if index in self.outcomes:
            return
        duration = time.monotonic() - self._began.get(index, time.monotonic())
        if task.cancelled():  # also before its first step, when the task's own code never runs
            self.outcomes[index] = AgentOutcome(AgentStatus.CANCELLED, duration, error="cancelled")
        elif (error := task.exception()) is not None:
            self.outcomes[index] = AgentOutcome(AgentStatus.FAILED, duration, error=told(error))
        else:
            self.outcomes[index] = task.result()
