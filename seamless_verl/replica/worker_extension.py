"""verl's extension of vLLM's workers, which also loads weights that are staged in the host's memory.

What verl does before and after a load, for each kind of model, stays verl's; only the source of the bytes differs,
so that an engine pauses for a load and not for a transfer.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from verl.utils.device import get_torch_device
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from seamless_verl.platform.adaptation import rebound
from seamless_verl.replica.load_plan import Plans
from seamless_verl.weights.staging import StagedWeights, mapped_here

Weights = list[tuple[str, torch.Tensor]]
BEFORE_LOAD = "before_load"  # of a worker: what it does before a load into `models`, which may be a brief one


class SeamlessWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """In each worker of an engine; vLLM calls it by the methods' names. Owned state: what was mapped to be loaded, and
    how it is loaded without the model's loaders."""

    mapped: tuple[StagedWeights, Weights] | None = None
    plans: Plans | None = None

    def map_staged(self, staged: bytes) -> None:
        """Map what this host has of these pickled HostWeights, while the engine generates."""
        self.mapped = mapped_here(pickle.loads(staged))

    def clock(self) -> float:
        """When the engine came to this, on its host's clock."""
        return time.monotonic()

    def load_staged(self, version: int, bucket_bytes: int) -> float:
        """Load what was mapped, while the engine stands still; returns when it began, on this host's clock."""
        began = time.monotonic()
        assert self.mapped is not None and self.mapped[0].version == version, f"version {version} is not mapped"
        (staged, weights), self.mapped = self.mapped, None
        self.plans = self.plans or Plans()
        whole = staged.peft is None  # an adapter is no part of the model
        plans, models = (self.plans, list(self._iter_all_models())) if whole else (Plans(tried=True), [])
        getattr(self, BEFORE_LOAD, no_preparation)(models, briefly=plans.plan is not None)
        mapped = partial(MappedReceiver, weights, bucket_bytes, plans, models)
        kind = {} if whole else {"peft_config": staged.peft, "base_sync_done": True}
        with rebound(bucketed_weight_transfer, BucketedWeightReceiver=mapped):
            self.update_weights_from_ipc(**kind, use_shm=True)
        return began


def no_preparation(models: Sequence[torch.nn.Module], *, briefly: bool) -> None:
    """Devices that copy by themselves need nothing before a load."""


class MappedReceiver:
    """Has weights already; to verl it looks as if it received them, at most `bucket_bytes` on the device at a time."""

    def __init__(
        self,
        weights: Weights,
        bucket_bytes: int,
        plans: Plans,
        models: Sequence[torch.nn.Module],
        zmq_handle: str,
        device: torch.device,
        use_shm: bool,
    ) -> None:
        self.weights, self.bucket_bytes, self.device = weights, bucket_bytes, device
        self.plans, self.models = plans, models

    def receive_weights(self, on_bucket_received: Callable[[Weights, bool], None]) -> None:
        if not self.plans.load(self.weights, self.models):
            with self.plans.recording(self.models) as next_bucket:
                self.hand_over(on_bucket_received, next_bucket)
        get_torch_device().synchronize()
        get_torch_device().empty_cache()

    def hand_over(
        self, on_bucket_received: Callable[[Weights, bool], None], next_bucket: Callable[[Weights], None]
    ) -> None:
        for bucket, is_last in self.buckets():
            here = [(name, weight.to(self.device)) for name, weight in bucket]
            next_bucket(here)
            on_bucket_received(here, is_last)
            get_torch_device().synchronize()

    def buckets(self) -> Iterator[tuple[Weights, bool]]:
        """Weights that fit together, and whether they are the last ones; one that is too large next_bucket alone."""
        bucket: Weights = []
        size = 0
        for name, weight in self.weights:
            if bucket and size + weight.nbytes > self.bucket_bytes:
                yield bucket, False
                bucket, size = [], 0
            bucket.append((name, weight))
            size += weight.nbytes
        yield bucket, True


def extension() -> str:
    """The name by which vLLM imports it."""
    return f"{SeamlessWorkerExtension.__module__}.{SeamlessWorkerExtension.__qualname__}"


def pickled(weights: Any) -> bytes:
    """As it travels to the workers, whose own serialization does not know what it holds."""
    return pickle.dumps(weights)
