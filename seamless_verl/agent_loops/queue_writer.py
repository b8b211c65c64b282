"""Writes rows to TransferQueue, those of many groups in one put.

A put costs about the same for one row as for a hundred, and groups that began together end in bursts. So one put runs
at a time, and rows that arrive meanwhile are written by the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from seamless_verl.agent_loops.rows import Row

Fields: TypeAlias = Callable[[list[dict[str, Any]]], Any]


@dataclass(eq=False)
class PendingWrite:
    """The rows of one group; `done` resolves when they are written, or raises the error that prevented it."""

    partition: str
    rows: Sequence[Row]
    done: asyncio.Future[None]


class QueueWriter:
    """A writer for one event loop. Owned state: the pending writes, and the task that puts them.

    `since` is when the put began that runs, on the monotonic clock; None while none does.
    """

    def __init__(self, fields: Fields = list_of_dict_to_tensordict) -> None:
        """`fields` makes those of a put of its rows."""
        self.fields = fields
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
            self.writing = asyncio.create_task(self._put())
        await write.done

    async def _put(self) -> None:
        writes = list[PendingWrite]()
        try:
            while self.waiting:
                writes, self.waiting = self.waiting, []
                for partition in dict.fromkeys(write.partition for write in writes):
                    pending = [write for write in writes if write.partition == partition and not write.done.done()]
                    self.since = time.monotonic()
                    await put_batch(pending, partition, self.fields)
        finally:
            self.since = None
            for write in (*writes, *self.waiting):  # no effect on those that are done
                write.done.cancel()
            self.waiting, self.writing = [], None


async def put_batch(writes: Sequence[PendingWrite], partition: str, fields: Fields) -> None:
    """Puts the rows of all writes; if that fails, those of each write alone, since only one may be at fault."""
    try:
        for similar in by_columns([row for write in writes for row in write.rows]):
            keys, columns, tags = (list(part) for part in zip(*similar, strict=True))
            await tq.async_kv_batch_put(keys=keys, fields=fields(columns), tags=tags, partition_id=partition)
    except Exception as error:  # raised by `QueueWriter.put`
        if len(writes) == 1:
            finish(writes, error)
            return
        for write in writes:
            await put_batch([write], partition, fields)
    else:
        finish(writes, None)


def finish(writes: Sequence[PendingWrite], error: Exception | None) -> None:
    for write in writes:
        if write.done.done():  # its caller was cancelled
            continue
        if error is None:
            write.done.set_result(None)
        else:
            write.done.set_exception(error)


def by_columns(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups the rows by their columns, in order: all rows of a batch have the same columns."""
    groups: defaultdict[frozenset[str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[frozenset(row.columns)].append(row)
    return list(groups.values())
