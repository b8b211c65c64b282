"""Retention of the journal: its oldest sessions are deleted beside the run, at most one deletion at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from seamless_verl.errors import JournalError
from seamless_verl.journal import CompactionResult, SqliteJournal

logger = logging.getLogger(__name__)
DAY_S, GIB = 24 * 3600.0, 1 << 30


class Retention:
    """Deletes sessions that were handed over more than `days` ago, and the oldest while the file is above `gib`.

    None is no bound. Nobody waits for a deletion: what is deleted was written days or gigabytes ago. `needed` gives the
    sessions that stay in any case, None while they are not known: then nothing is deleted. Invariants: `task` is the
    only one that compacts; a clock that jumps makes no session older. `check` is called in the event loop.
    """

    def __init__(
        self,
        journal: SqliteJournal,
        days: float | None,
        gib: float | None,
        needed: Callable[[], Collection[str] | None] = frozenset,
    ) -> None:
        self.journal, self.days, self.gib, self._needed = journal, days, gib, needed
        self._began = time.time() - time.monotonic()
        self.deleted, self.used_bytes = 0, 0
        self.task: asyncio.Task[CompactionResult] | None = None

    def check(self) -> None:
        """Takes the result of the last deletion, or raises its error, and begins the next unless one is under way."""
        if self.task is not None:
            if not self.task.done():
                return
            self._take(self.task.result())
        self.task = None
        if (needed := self._needed()) is not None:
            self.task = asyncio.create_task(self._compact(frozenset(needed)))

    def _take(self, result: CompactionResult) -> None:
        self.used_bytes = result.used_bytes
        if result.sessions and not self.deleted:
            logger.warning(
                "the journal deletes its oldest sessions: above seamless.gateway.journal_gib=%s, or %s days old",
                self.gib,
                self.days,
            )
        self.deleted += result.sessions

    async def _compact(self, needed: Collection[str]) -> CompactionResult:
        now = min(time.time(), self._began + time.monotonic())
        before = 0.0 if self.days is None else now - self.days * DAY_S
        return await self.journal.compact(before, None if self.gib is None else int(self.gib * GIB), needed)

    async def end(self) -> None:
        """After the journal was closed, which ends a deletion that is under way."""
        if self.task is not None:
            with suppress(JournalError):  # it says that the journal is closed
                await self.task

    def metrics(self) -> dict[str, float]:
        return {"journal/bytes": float(self.used_bytes), "journal/deleted": float(self.deleted)}
