"""Weight transfer over gloo: verl's checkpoint engine `gloo`, for hosts without NCCL.

Actor rank 0 packs weights into buckets and broadcasts each to all rollout workers. The other actor ranks only iterate
over the weights, since exporting a weight is collective among them. A group exists for one transfer: building it costs
a few milliseconds, and replicas that joined or left since need no special case. verl loads this module in trainer and
rollout workers through `checkpoint_engine.custom_backend_module`.

Wire format of a bucket: int64[3] (metadata bytes, payload bytes, is last), metadata pickled, payload.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)

NOT_A_MEMBER = -1  # rank of an actor worker that takes no part in the broadcast


@dataclass(frozen=True)
class Rendezvous:
    """The address of one transfer's store, which actor rank 0 opened and every member connects to."""

    host: str
    port: int


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """One transfer at a time: prepare, init_process_group, send or receive, finalize.

    Args:
        bucket_size: bytes of a bucket; larger tensors travel in several.
        is_master: whether this is actor rank 0, the only sender.
        timeout_s: seconds any step may wait for the other members.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = 120.0, **_: Any) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self.timeout = timedelta(seconds=timeout_s)
        self.rank = NOT_A_MEMBER
        self.store: Any = None
        self.group: Any = None

    def prepare(self) -> Rendezvous | None:
        self.finalize()  # of a transfer that failed half-way
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address()  # by which other nodes reach this one
        self.store = dist.TCPStore(host, 0, is_master=True, timeout=self.timeout, wait_for_workers=False)
        return Rendezvous(host, self.store.port)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        rendezvous, world = metadata[0], 1 + rollout_world_size
        assert rendezvous is not None, "actor rank 0 must be the master of the transfer"

        def members(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "world_size": [world] * len(ranks), "rendezvous": [rendezvous] * len(ranks)}

        actor_ranks = [0] + [NOT_A_MEMBER] * (actor_wg_world_size - 1)
        return members(actor_ranks), members(list(range(1, world)))

    def init_process_group(self, rank: int, world_size: int, rendezvous: Rendezvous) -> None:
        self.rank = rank
        if rank == NOT_A_MEMBER:
            return
        if self.store is None:
            self.store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=self.timeout)
        self.group = dist.ProcessGroupGloo(self.store, rank, world_size, self.timeout)

    def finalize(self) -> None:
        self.group = self.store = None
        self.rank = NOT_A_MEMBER

    @torch.no_grad()
    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> None:
        if self.rank == NOT_A_MEMBER:
            for _ in weights:
                pass
            return
        bucket = Bucket(self.bucket_size)
        async for meta, chunk in split_weight_chunks(weights, self.bucket_size):
            if not bucket.fits(meta):
                await self.send(bucket, last=False)
                bucket.clear()
            bucket.add(meta, chunk)
        await self.send(bucket, last=True)

    async def send(self, bucket: Bucket, *, last: bool) -> None:
        metas = torch.frombuffer(bytearray(pickle.dumps(bucket.metas)), dtype=torch.uint8)
        payload = bucket.buffer[: bucket.used]
        sizes = torch.tensor([metas.numel(), payload.numel(), int(last)])
        await asyncio.to_thread(self.broadcast, sizes, metas, payload)

    def broadcast(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.numel():
                self.group.broadcast([tensor], dist.BroadcastOptions()).wait()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        async for name, weight in merge_weight_chunks(self.chunks(), self.bucket_size):
            yield name, weight

    async def chunks(self) -> AsyncGenerator[tuple[TensorMeta, torch.Tensor], None]:
        last = False
        while not last:
            metas, payload, last = await asyncio.to_thread(self.receive)
            for meta in metas:
                yield meta, payload[meta.offset : meta.offset + meta.chunk_size]

    def receive(self) -> tuple[list[TensorMeta], torch.Tensor, bool]:
        sizes = torch.empty(3, dtype=torch.int64)
        self.broadcast(sizes)
        meta_bytes, payload_bytes, last = sizes.tolist()
        metas = torch.empty(meta_bytes, dtype=torch.uint8)
        payload = torch.empty(payload_bytes, dtype=torch.uint8)
        self.broadcast(metas, payload)
        return pickle.loads(metas.numpy().tobytes()), payload, bool(last)


class Bucket:
    """Chunks of weights packed into one buffer, each at a multiple of 8 bytes so that views align."""

    def __init__(self, size: int) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8)
        self.clear()

    def clear(self) -> None:
        self.metas: list[TensorMeta] = []
        self.used = 0

    def fits(self, meta: TensorMeta) -> bool:
        return self.aligned() + meta.chunk_size <= self.buffer.numel()

    def aligned(self) -> int:
        return -(-self.used // 8) * 8

    def add(self, meta: TensorMeta, chunk: torch.Tensor) -> None:
        meta.offset = self.aligned()
        self.used = meta.offset + meta.chunk_size
        self.buffer[meta.offset : self.used] = chunk
        self.metas.append(meta)
