"""Giving a closed session to its consumer exactly once.

The journal and the consumer share no transaction, so three records bracket the gift: CLOSED, HANDING
(written before the consumer is touched), HANDED (written after it has everything). A crash leaves
1. CLOSED: the consumer was never touched; give.
2. HANDING: nobody knows, so the consumer is asked. It must say yes when it holds, or has already
   consumed, the whole session, and no otherwise; a part is a no, and giving again overwrites that
   part, because keys are a function of the session alone.
3. HANDED: never give again.
So a session may be put twice, but is seen once: the second put overwrites what still waits, and the
consumer's answer prevents it once that was consumed. A no after consumption is the one way to train a
token twice; a yes for less than the whole is the one way to lose it.

Invariant: in one process a session is being given by at most one task.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import time

from seamless_verl.errors import JournalOrderError
from seamless_verl.trajectory.journal.events import HandedOver, HandOverBegun
from seamless_verl.trajectory.journal.protocol import Journal
from seamless_verl.trajectory.journal.recorded import SessionRecord, Stage


class Handover:
    """Gives a journal's closed sessions to one consumer; one per journal, as the journal has one writer.

    Args:
        put: keeps a session under keys that are a function of it alone; returns when all of it is kept.
        already_there: whether the consumer holds, or has consumed, the whole session of that id.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        put: Callable[[SessionRecord], Awaitable[None]],
        already_there: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._journal, self._put, self._already_there = journal, put, already_there
        self._giving: set[str] = set()

    async def give(self, session_id: str) -> bool:
        """Give one closed session, once; whether this call put it. One that another task is giving is left to it.

        Called for each session as it is closed, and for every id of `unhanded()` after a restart.

        Raises:
            JournalOrderError: the session is unknown or open.
        """
        if session_id in self._giving:
            return False
        self._giving.add(session_id)
        try:
            return await self._give(session_id)
        finally:
            self._giving.remove(session_id)

    async def _give(self, session_id: str) -> bool:
        record = self._journal.read(session_id)
        if record is None or record.stage is Stage.OPEN:
            raise JournalOrderError("hand-over", session_id, "the session is unknown or open; close it first")
        if record.stage is Stage.HANDED:
            return False
        there = record.stage is Stage.HANDING and await self._already_there(session_id)
        if record.stage is Stage.CLOSED:
            await self._journal.append(HandOverBegun(session_id))
        if not there:
            await self._put(record)
        await self._journal.append(HandedOver(session_id, time()))
        return not there
