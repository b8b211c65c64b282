"""Work that is done whole, also when who waits for it is cancelled meanwhile, and cancelled again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class WholeWork:
    """Owned state: the work that is being done, which its callers may have left."""

    def __init__(self) -> None:
        self._working: set[asyncio.Future[Any]] = set()

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. A caller that is cancelled leaves at once, and the work goes on."""
        task = asyncio.ensure_future(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return await asyncio.shield(task)

    async def ended(self) -> None:
        """Returns when all that is being done now has ended; its errors are its callers'."""
        if self._working:
            await asyncio.wait(self._working)
