"""verl's extension of vLLM's workers, which also loads weights that wait in the host's memory.

What verl does before and after a load, for each kind of model, is left to verl: only where its bytes come from is
another place, so that an engine stands still for a load and not for a transfer.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from seamless_verl.trainer.host import rebound
from seamless_verl.trainer.host_weights import HostWeights, here

BUCKET_BYTES = 512 << 20  # on the device at once, beside the weights that they replace
Weights = list[tuple[str, torch.Tensor]]


class SeamlessWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """In each worker of an engine; vLLM calls it by the methods' names."""

    def load_staged(self, staged: bytes) -> None:
        """Load what this host has of these pickled HostWeights; the engine stands still meanwhile."""
        weights = here(pickle.loads(staged))
        kind = {} if weights.peft is None else {"peft_config": weights.peft, "base_sync_done": True}
        mapped = partial(MappedReceiver, weights)
        with rebound(bucketed_weight_transfer, BucketedWeightReceiver=mapped):
            self.update_weights_from_ipc(**kind, use_shm=True)


class MappedReceiver:
    """Has weights already; to verl it looks as if it received them."""

    def __init__(self, weights: HostWeights, zmq_handle: str, device: torch.device, use_shm: bool) -> None:
        self.weights, self.device = weights, device

    def receive_weights(self, on_bucket_received: Callable[[Weights, bool], None]) -> None:
        bucket: Weights = []
        for name, weight in self.weights:
            if bucket and weight.nbytes + sum(one.nbytes for _, one in bucket) > BUCKET_BYTES:
                on_bucket_received(bucket, False)
                bucket = []
            bucket.append((name, weight.to(self.device)))
        on_bucket_received(bucket, True)


def extension() -> str:
    """The name by which vLLM imports it."""
    return f"{SeamlessWorkerExtension.__module__}.{SeamlessWorkerExtension.__qualname__}"


def pickled(weights: Any) -> bytes:
    """As it travels to the workers, whose own serialization does not know what it holds."""
    return pickle.dumps(weights)
