"""Writes rows to TransferQueue, those of many groups at a time.

A put costs much the same for one row as for a hundred, and groups end in bursts, since what was drawn together ends
together. So one put is under way at a time, and rows that come meanwhile go with the next.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from seamless_verl.agent_loops.rows import Row


@dataclass(eq=False)
class PendingWrite:
    """The rows of one group; `done` resolves when they are written, or with what prevented it."""

    partition: str
    rows: Sequence[Row]
    done: asyncio.Future[None]


class QueueWriter:
    """Of one event loop. Owned state: the writes that wait, and the task that puts, which ends when none wait."""

    def __init__(self) -> None:
        self.waiting: list[PendingWrite] = []
        self.writing: asyncio.Task[None] | None = None

    async def put(self, rows: Sequence[Row], partition: str) -> None:
        """Returns when TransferQueue has them; raises what prevented it.

        A caller that is cancelled before its put begins writes nothing; a put that is under way goes to its end.
        """
        write = PendingWrite(partition, rows, asyncio.get_running_loop().create_future())
        self.waiting.append(write)
        if self.writing is None:
            self.writing = asyncio.create_task(self._put())
        await write.done

    async def _put(self) -> None:
        writes = list[PendingWrite]()
        try:
            while self.waiting:
                writes, self.waiting = self.waiting, []
                for partition in {write.partition: None for write in writes}:
                    pending = [one for one in writes if one.partition == partition and not one.done.done()]
                    await put_batch(pending, partition)
        finally:
            for write in (*writes, *self.waiting):  # finished ones stay so; the rest was cancelled
                write.done.cancel()
            self.waiting, self.writing = [], None


async def put_batch(writes: Sequence[PendingWrite], partition: str) -> None:
    """All of their rows; when that fails, each by itself, since one group's may not be put beside another's."""
    try:
        for similar in by_columns([row for write in writes for row in write.rows]):
            keys, columns, tags = (list(part) for part in zip(*similar, strict=True))
            batch = list_of_dict_to_tensordict(columns)
            await tq.async_kv_batch_put(keys=keys, fields=batch, tags=tags, partition_id=partition)
    except Exception as error:  # raised to whoever waits for the write
        if len(writes) == 1:
            finish(writes, error)
            return
        for write in writes:
            await put_batch([write], partition)
    else:
        finish(writes, None)


def finish(writes: Sequence[PendingWrite], error: Exception | None) -> None:
    for write in writes:
        if write.done.done():  # nobody waits for it any more
            continue
        if error is None:
            write.done.set_result(None)
        else:
            write.done.set_exception(error)


def by_columns(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows by the names of their columns, each in its order: a batch has the same in all of its rows."""
    kinds: defaultdict[frozenset[str], list[Row]] = defaultdict(list)
    for row in rows:
        kinds[frozenset(row.columns)].append(row)
    return list(kinds.values())
