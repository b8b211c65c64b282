"""A load into an engine that is absent, or dies during it, fails, where verl's own would wait for ever."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch
import zmq
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer

from seamless_verl.weights.transfer import BoundedSender, bound_transfers

SEGMENTS = Path("/dev/shm")


def die_after(buckets: int, handle: str) -> None:
    """A receiver that takes its buffer and so many buckets, and then is silent."""
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.connect(handle)
        for count in range(buckets + 2):
            socket.recv()
            if count <= buckets:
                socket.send(b"")


@pytest.mark.parametrize("buckets", [None, 0, 1])
def test_a_bucket_that_nobody_takes_ends_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buckets: int | None
) -> None:
    monkeypatch.setattr(BoundedSender, "bucket_timeout_s", 0.5)
    handle, made = f"ipc://{tmp_path}/weights.sock", list[str]()
    create = transfer.create_shared_memory
    monkeypatch.setattr(transfer, "create_shared_memory", lambda size, name: (made.append(name), create(size, name))[1])
    weights = [(f"w{i}", torch.zeros(200_000)) for i in range(3)]
    receiver = threading.Thread(target=die_after, args=(buckets, handle))
    if buckets is not None:
        receiver.start()
    with pytest.raises(TimeoutError, match=r"taken no weights for 0\.5 s"):
        asyncio.run(BoundedSender(handle, bucket_size_mb=1, use_shm=True).async_send_weights(iter(weights)))
    if buckets is not None:
        receiver.join()
    assert not (tmp_path / "weights.sock").exists()
    (name,) = made
    forgotten = buckets is None  # verl forgets what it could not announce, until its process ends
    assert (SEGMENTS / name).exists() == forgotten


def test_every_load_of_the_process_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.rollout.vllm_rollout import vllm_rollout

    monkeypatch.setattr(vllm_rollout, "BucketedWeightSender", vllm_rollout.BucketedWeightSender)
    bound_transfers()
    bound_transfers()
    assert vllm_rollout.BucketedWeightSender is BoundedSender
