"""Rows on their way to TransferQueue.

A put costs much the same for one row as for a hundred, and groups end in bursts, since what was drawn together ends
together. So one put is on its way at a time, and what comes meanwhile goes with the next.
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
    """The rows of one group; `arrived` has what became of them."""

    partition: str
    rows: Sequence[Row]
    arrived: asyncio.Future[None]


class QueueWriter:
    """Of one event loop. Owned state: the parcels that wait, and the task that puts, which ends when none do."""

    def __init__(self) -> None:
        self.waiting: list[PendingWrite] = []
        self.putting: asyncio.Task[None] | None = None

    async def put(self, rows: Sequence[Row], partition: str) -> None:
        """Returns when TransferQueue has them; raises what kept it from that. Who leaves before its put begins puts
        nothing; of one that is under way it does not hear the end."""
        parcel = PendingWrite(partition, rows, asyncio.get_running_loop().create_future())
        self.waiting.append(parcel)
        if self.putting is None:
            self.putting = asyncio.create_task(self._put())
        await parcel.arrived

    async def _put(self) -> None:
        parcels = list[PendingWrite]()
        try:
            while self.waiting:
                parcels, self.waiting = self.waiting, []
                for partition in {parcel.partition: None for parcel in parcels}:
                    mine = [one for one in parcels if one.partition == partition and not one.arrived.done()]
                    await put_together(mine, partition)
        finally:
            for parcel in (*parcels, *self.waiting):  # what is settled stays so; the rest was cancelled
                parcel.arrived.cancel()
            self.waiting, self.putting = [], None


async def put_together(parcels: Sequence[PendingWrite], partition: str) -> None:
    """All of their rows; when that fails, each by itself, since one group's may not be put beside another's."""
    try:
        for alike in alike_in_columns([row for parcel in parcels for row in parcel.rows]):
            keys, columns, tags = (list(part) for part in zip(*alike, strict=True))
            batch = list_of_dict_to_tensordict(columns)
            await tq.async_kv_batch_put(keys=keys, fields=batch, tags=tags, partition_id=partition)
    except Exception as error:  # whoever waits for the parcel hears it
        if len(parcels) == 1:
            settle(parcels, error)
            return
        for parcel in parcels:
            await put_together([parcel], partition)
    else:
        settle(parcels, None)


def settle(parcels: Sequence[PendingWrite], error: Exception | None) -> None:
    for parcel in parcels:
        if parcel.arrived.done():  # nobody waits for it any more
            continue
        if error is None:
            parcel.arrived.set_result(None)
        else:
            parcel.arrived.set_exception(error)


def alike_in_columns(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows by the names of their columns, each in its order: a batch has the same in all of its rows."""
    kinds: defaultdict[frozenset[str], list[Row]] = defaultdict(list)
    for row in rows:
        kinds[frozenset(row.columns)].append(row)
    return list(kinds.values())
