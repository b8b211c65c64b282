"""What a prompt's sessions leave, put into TransferQueue when the last of them has ended.

verl puts each session by itself. Nothing reads one before its group has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from seamless_verl.trainer.data_plane.puts import Puts
from seamless_verl.trainer.data_plane.rows import Row
from seamless_verl.trainer.data_plane.samples import SessionOutputs


@dataclass
class Group:
    """The sessions of one prompt. They begin in one turn of the event loop, so that none has ended by then but one that
    waited for nothing; what such a one leaves goes by itself."""

    puts: Puts
    errors: list[str] = field(default_factory=list)
    running: int = 0
    failed: bool = False
    rows: list[Row] = field(default_factory=list)
    sessions: list[SessionOutputs] = field(default_factory=list)

    @contextmanager
    def session(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        except BaseException:
            self.failed = True
            raise
        finally:
            self.running -= 1

    async def hand_over(self, partition: str) -> None:
        """What there is, each row once; nothing of a group that has failed, which nobody trains on.

        The sessions' planes are told which of it was.
        """
        rows, self.rows, sessions, self.sessions = self.rows, [], self.sessions, []
        kept = False
        try:
            if not self.failed:
                await self.puts.put(rows, partition)
                kept = True
        finally:
            await asyncio.gather(*(session.handed(kept) for session in sessions))
