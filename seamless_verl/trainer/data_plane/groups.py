"""What a prompt's sessions leave, put into TransferQueue when the last of them has ended.

verl puts each session by itself. Nothing reads one before its group has ended, and a put costs much the same for one
row as for a group's.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from seamless_verl.trainer.data_plane.rows import Row
from seamless_verl.trainer.data_plane.samples import SessionOutputs


@dataclass
class Group:
    """The sessions of one prompt. They begin in one turn of the event loop, so that none has ended by then but one that
    waited for nothing; what such a one leaves goes by itself."""

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
                await put(rows, partition)
                kept = True
        finally:
            await asyncio.gather(*(session.handed(kept) for session in sessions))


async def put(rows: Sequence[Row], partition: str) -> None:
    for alike in alike_in_columns(rows):
        keys, columns, tags = (list(part) for part in zip(*alike, strict=True))
        batch = list_of_dict_to_tensordict(columns)
        await tq.async_kv_batch_put(keys=keys, fields=batch, tags=tags, partition_id=partition)


def alike_in_columns(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows by the names of their columns, each in its order: a batch has the same in all of its rows."""
    kinds: defaultdict[frozenset[str], list[Row]] = defaultdict(list)
    for row in rows:
        kinds[frozenset(row.columns)].append(row)
    return list(kinds.values())
