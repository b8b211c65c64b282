"""Runners that wait for a task: each queued task wakes one that can take it.

Owned state: the waiting requests, in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection


class TaskPolls:
    """Requests of runners. All calls are in one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[str], Collection[str]] = {}

    async def wait(self, agents: Collection[str]) -> None:
        """Until a task for one of these agents may be there; another request can have taken it.

        Cancelled at the moment at which it is woken, it wakes another one.
        """
        woken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[woken] = agents
        try:
            await woken
        except asyncio.CancelledError:
            if woken.done() and not woken.cancelled():
                self.offer(woken.result())
            raise
        finally:
            self._waiting.pop(woken, None)

    def offer(self, agent: str) -> None:
        """A task for this agent is queued: wakes the request that has waited longest of those that can take it."""
        for woken, agents in self._waiting.items():
            if agent in agents and not woken.done():
                woken.set_result(agent)
                del self._waiting[woken]
                return

    def wake_all(self) -> None:
        """Nothing more will be queued."""
        for woken in self._waiting:
            if not woken.done():
                woken.set_result("")
        self._waiting.clear()

    def __len__(self) -> int:
        return len(self._waiting)
