"""Writes rows to TransferQueue, those of many groups in one put, which costs about the same for one row as for many."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from seamless_verl.agent_loops.rows import Row


@dataclass(eq=False)
class PendingWrite:
    """The rows of one group; `done` resolves when they are written, or raises the error that prevented it."""

    partition: str
    rows: Sequence[Row]
    done: asyncio.Future[None]

    def end(self, error: Exception | None = None) -> None:
        if self.done.done():  # its caller was cancelled
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class QueueWriter:
    """A writer for one event loop: one put runs at a time, and rows that arrive meanwhile are written by the next one.

    Owned state: the pending writes, the task that puts them, and since when a put runs, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.waiting: list[PendingWrite] = []
        self.writing: asyncio.Task[None] | None = None

    async def put(self, rows: Sequence[Row], partition: str) -> None:
        """Returns when TransferQueue has the rows; raises the error that prevented it.

        If the caller is cancelled before its put begins, nothing is written; a put that has begun is completed.
        """
        write = PendingWrite(partition, rows, asyncio.get_running_loop().create_future())
        self.waiting.append(write)
        if self.writing is None:
            self.writing = asyncio.create_task(self._put_waiting())
        await write.done

    async def _put_waiting(self) -> None:
        writes = list[PendingWrite]()
        try:
            while self.waiting:
                writes, self.waiting = self.waiting, []
                for partition in dict.fromkeys(write.partition for write in writes):
                    pending = [write for write in writes if write.partition == partition and not write.done.done()]
                    self.since = time.monotonic()
                    await put_batch(pending, partition)
        finally:
            self.since = None
            for write in (*writes, *self.waiting):  # no effect on those that are done
                write.done.cancel()
            self.waiting, self.writing = [], None


async def put_batch(writes: Sequence[PendingWrite], partition: str) -> None:
    """Puts the rows of all writes, those of the same columns together; if that fails, those of each write alone."""
    by_columns: defaultdict[frozenset[str], list[Row]] = defaultdict(list)
    for row in (row for write in writes for row in write.rows):
        by_columns[frozenset(row.columns)].append(row)
    try:
        for similar in by_columns.values():
            keys, columns, tags = (list(part) for part in zip(*similar, strict=True))
            fields = list_of_dict_to_tensordict(columns)
            await tq.async_kv_batch_put(keys=keys, fields=fields, tags=tags, partition_id=partition)
    except Exception as error:  # raised by `QueueWriter.put`
        if len(writes) == 1:
            writes[0].end(error)
            return
        for write in writes:
            await put_batch([write], partition)
    else:
        for write in writes:
            write.end()
