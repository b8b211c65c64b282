"""verl's extension of vLLM's workers, which also loads weights that are staged in the host's memory.

verl's own code still runs before and after a load, for each kind of model. Only the source of the bytes differs, so
that an engine pauses for a load and not for a transfer.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from verl.utils.device import get_torch_device
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from seamless_verl.platform.adaptation import rebound
from seamless_verl.replica.load_plan import PlanCache
from seamless_verl.weights.staging import StagedWeights, map_on_this_host

Weights = list[tuple[str, torch.Tensor]]
BEFORE_LOAD = "before_load"  # a worker's method, called before a load into `models`; see `no_preparation`


class SeamlessWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Runs in each worker of an engine; vLLM calls its methods by name. Owned state: the weights that were mapped for
    the next load, and the load plan."""

    mapped: tuple[StagedWeights, Weights] | None = None
    plan_cache: PlanCache | None = None

    def map_staged(self, staged: bytes) -> None:
        """Maps those of these pickled StagedWeights that are on this host; the engine may generate meanwhile."""
        self.mapped = map_on_this_host(pickle.loads(staged))

    def clock(self) -> float:
        """The time at which the engine runs this call, on its host's clock."""
        return time.monotonic()

    def load_staged(self, version: int, bucket_bytes: int) -> float:
        """Loads what was mapped, while the engine is paused; returns when it began, on this host's clock."""
        began = time.monotonic()
        assert self.mapped is not None and self.mapped[0].version == version, f"version {version} is not mapped"
        (staged, weights), self.mapped = self.mapped, None
        self.plan_cache = self.plan_cache or PlanCache()
        is_model = staged.peft is None
        no_plan = PlanCache(attempted=True)  # for an adapter, which is no part of the model
        cache, models = (self.plan_cache, list(self._iter_all_models())) if is_model else (no_plan, [])
        getattr(self, BEFORE_LOAD, no_preparation)(models, planned=cache.plan is not None)
        receiver = partial(MappedReceiver, weights, bucket_bytes, cache, models)
        adapter = {} if is_model else {"peft_config": staged.peft, "base_sync_done": True}
        with rebound(bucketed_weight_transfer, BucketedWeightReceiver=receiver):
            self.update_weights_from_ipc(**adapter, use_shm=True)
        return began


def no_preparation(models: Sequence[torch.nn.Module], *, planned: bool) -> None:
    """For devices that need no preparation. A `planned` load has a load plan, and is short."""


class MappedReceiver:
    """Stands in for verl's receiver: gives verl the mapped weights, at most `bucket_bytes` on the device at a time."""

    def __init__(
        self,
        weights: Weights,
        bucket_bytes: int,
        cache: PlanCache,
        models: Sequence[torch.nn.Module],
        zmq_handle: str,
        device: torch.device,
        use_shm: bool,
    ) -> None:
        self.weights, self.bucket_bytes, self.device = weights, bucket_bytes, device
        self.cache, self.models = cache, models

    def receive_weights(self, on_bucket_received: Callable[[Weights, bool], None]) -> None:
        if not self.cache.load(self.weights, self.models):
            with self.cache.recording(self.models) as next_bucket:
                self.load_buckets(on_bucket_received, next_bucket)
        get_torch_device().synchronize()
        get_torch_device().empty_cache()

    def load_buckets(
        self, on_bucket_received: Callable[[Weights, bool], None], next_bucket: Callable[[Weights], None]
    ) -> None:
        for bucket, is_last in self.buckets():
            on_device = [(name, weight.to(self.device)) for name, weight in bucket]
            next_bucket(on_device)
            on_bucket_received(on_device, is_last)
            get_torch_device().synchronize()

    def buckets(self) -> Iterator[tuple[Weights, bool]]:
        """Weights that fit into one bucket, and whether they are the last; a weight that is too large comes alone."""
        bucket: Weights = []
        size = 0
        for name, weight in self.weights:
            if bucket and size + weight.nbytes > self.bucket_bytes:
                yield bucket, False
                bucket, size = [], 0
            bucket.append((name, weight))
            size += weight.nbytes
        yield bucket, True


def extension_name() -> str:
    """The name by which vLLM imports the extension."""
    return f"{SeamlessWorkerExtension.__module__}.{SeamlessWorkerExtension.__qualname__}"
