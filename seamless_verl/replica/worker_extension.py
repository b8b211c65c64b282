"""verl's extension of vLLM's workers, which also loads weights that are staged in the host's memory.

verl's own code still runs before and after a load, for each kind of model. Only the source of the bytes differs, so
that an engine pauses for a load and not for a transfer.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from verl.utils.device import get_torch_device
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from seamless_verl.errors import SealError
from seamless_verl.platform.adaptation import rebound
from seamless_verl.platform.vllm_versions import discard_memory, map_adapters_names
from seamless_verl.replica.adapter_seal import ResidentAdapter
from seamless_verl.replica.computed_buffers import keep_computed_buffers
from seamless_verl.replica.drafts import SuffixProposer
from seamless_verl.replica.load_plan import LoadPlan, PlanCache
from seamless_verl.replica.own_logprobs import LogprobRecorder, LogprobRecorderV2, record_own_logprobs
from seamless_verl.replica.rereading import ReadingTemperature
from seamless_verl.replica.seal import ResidentSeal
from seamless_verl.runtime.checkpoint_marker import system_id
from seamless_verl.runtime.process import end_with_process
from seamless_verl.weights.host_copies import HostCopies
from seamless_verl.weights.staging import MappedMemory, StagedWeights, map_on_this_host

logger = logging.getLogger(__name__)
T = TypeVar("T")
KV_CACHE = "kv_cache"  # vLLM's tag of its memory
Weights = list[tuple[str, torch.Tensor]]
DROP_MEMORY = "drop_kept_memory"  # a worker's method; see `nothing_kept`
DROP_CACHE = "drop_cache"  # a worker's method on a platform whose memory is not vLLM's to put away
BEFORE_LOAD = "before_load"  # a worker's method, called before a load into `models`; see `no_preparation`


def returning_errors(method: Callable[..., T]) -> Callable[..., T | str]:
    """The method of a worker, which returns its error as text.

    For an error that is raised, vLLM 0.24 takes the replies of an engine's other workers for those of the next call.
    Of data-parallel engines vLLM gives only the first one's replies, but the errors of all: there it is raised.
    """

    @wraps(method)
    def run(worker: Any, *args: Any, **kwargs: Any) -> T | str:
        try:
            return method(worker, *args, **kwargs)
        except Exception as error:  # whatever it is, the replica's process gets it as a reply
            if worker.vllm_config.parallel_config.data_parallel_size > 1:
                raise
            logger.exception("%s failed", method.__name__)
            return f"{type(error).__name__}: {error}"

    return run


def check_replies(replies: Sequence[Any]) -> Sequence[Any]:
    """The replies of all workers; raises RuntimeError if one is the text of an error."""
    errors = [reply for reply in replies if isinstance(reply, str)]
    if errors:
        raise RuntimeError("; ".join(errors))
    return replies


class SeamlessWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Runs in each worker of an engine; vLLM calls its methods by name. Owned state: the mapped memory of the host, the
    weights in it that the next load loads, the load plan, the seal of what is loaded, whether the cache is put away,
    and the recorder of logprobs.
    """

    mapped_memory: MappedMemory | None = None
    mapped: tuple[StagedWeights, Weights] | None = None
    plan_cache: PlanCache | None = None
    resident: ResidentSeal | None = None
    cache_away = False
    own_logprobs: LogprobRecorder | LogprobRecorderV2 | None = None
    reading: ReadingTemperature | None = None

    def __new__(cls, **kwargs: Any) -> SeamlessWorkerExtension:
        keep_computed_buffers()
        return super().__new__(cls, **kwargs)  # type: ignore[no-any-return]

    @returning_errors
    def record_own_logprobs(self) -> bool:
        """From now on the model's own logprobs are recorded, whatever constrains the sampling; also of drafted tokens,
        if it returns True. A second call changes nothing."""
        self.own_logprobs = self.own_logprobs or record_own_logprobs(self)
        self.reading = self.reading or ReadingTemperature(self)
        if self.rank % self.vllm_config.parallel_config.tensor_parallel_size == 0:  # the engine takes the drafts of one
            for proposer in self._proposers():
                proposer.draft_for(self.model_runner)
        return self.own_logprobs.covers_drafts or self.vllm_config.speculative_config is None

    def _proposers(self) -> list[SuffixProposer]:
        """Our own proposer of drafts, where the engine has it."""
        drafter = getattr(self.model_runner, "drafter", None)
        return [drafter] if isinstance(drafter, SuffixProposer) else []

    @returning_errors
    def learn(self, samples: bytes) -> tuple[int, float] | None:
        """Drafts from now on from these pickled samples of other replicas, too.

        Returns the gains of drafts until now: accepted tokens from samples of the same prompt, and seconds.
        """
        for proposer in self._proposers():
            proposer.learn(pickle.loads(samples))
            return proposer.gains.of_prompt, proposer.gains.saved_s
        return None

    @returning_errors
    def end_with(self, server: int, system: str | None) -> None:
        """From now on this process ends with the server's process, which has this id within `system`.

        An engine whose server was killed would keep its device's memory, which the next one needs. Another system is
        that of an engine's worker on another host.
        """
        if system is not None and system == system_id():
            end_with_process(server)

    @returning_errors
    def map_staged(self, staged: bytes) -> None:
        """Maps those of these pickled StagedWeights that are on this host; the engine may generate meanwhile.

        Raises SealError if they are not what the trainer had. The workers of an engine divide the blocks among them.
        """
        pinned = HostCopies() if torch.cuda.is_available() else None
        self.mapped_memory = self.mapped_memory or MappedMemory(pinned)
        self.resident = self.resident or ResidentSeal(self.rank)
        self.mapped = None
        mapped = map_on_this_host(pickle.loads(staged), self.mapped_memory)
        self.resident.mapped(*mapped, self.mapped_memory, self.vllm_config.parallel_config.world_size)
        self.mapped = mapped

    @returning_errors
    def drop_memory(self) -> None:
        """After vLLM's worker was put to sleep: drops what it has kept, on a platform where it keeps all."""
        if self.resident is not None:
            self.resident.away = True
        getattr(self, DROP_MEMORY, nothing_kept)()

    @returning_errors
    def remember_weights(self) -> None:
        """Before memory is put away: makes digests of weights that will be there when it is back."""
        if self.resident is not None:
            self.resident.remember(list(self._iter_all_models()))

    @returning_errors
    def put_cache_away(self) -> None:
        """Gives the memory of the KV cache to others, contents and all; the weights stay. May be repeated."""
        if not self.cache_away:
            if self.resident is not None:
                self.resident.remember(list(self._iter_all_models()))
            getattr(self, DROP_CACHE, partial(discard_memory, KV_CACHE))()
            self.cache_away = True

    @returning_errors
    def take_cache_back(self) -> None:
        """Maps memory for the KV cache again, at the same addresses; its contents are lost. May be repeated.

        Raises SealError if weights changed meanwhile, once the cache is back.
        """
        if self.cache_away:
            self.wake_up([KV_CACHE])
            self.cache_away = False
            if self.resident is not None:
                self.resident.compare_remembered()

    @returning_errors
    def verify_weights(self, staged: bytes) -> bool:
        """Compares all that was loaded with these pickled StagedWeights, while they are mapped; SealError for what
        differs. False if nothing of it is sealed."""
        if self.resident is None:
            return False
        version, weights = map_on_this_host(pickle.loads(staged), self.mapped_memory)
        return self.resident.compare_all(version, weights)

    def clock(self) -> float:
        """The time at which the engine runs this call, on its host's clock."""
        return time.monotonic()

    @returning_errors
    def load_staged(self, version: int, bucket_bytes: int) -> float:
        """Loads what was mapped, while the engine is paused; returns when it began, on this host's clock."""
        began = time.monotonic()
        assert self.mapped is not None and self.resident is not None, f"version {version} is not mapped"
        assert self.mapped[0].version == version, (
            f"version {version} is to be loaded, {self.mapped[0].version} is mapped"
        )
        (staged, weights), self.mapped = self.mapped, None
        self.plan_cache = self.plan_cache or PlanCache()
        is_model = staged.peft is None
        no_plan = PlanCache(attempted=True)  # for an adapter, which is no part of the model
        cache, models = (self.plan_cache, list(self._iter_all_models())) if is_model else (no_plan, [])
        getattr(self, BEFORE_LOAD, no_preparation)(models, planned=cache.plan is not None)
        copied = partial(self.resident.copied, models=models, staged=staged, weights=weights)
        receiver = partial(MappedReceiver, weights, bucket_bytes, cache, models, copied=copied)
        options = {} if is_model else {"peft_config": staged.peft, "base_sync_done": True}
        adapter = None
        if not is_model:
            map_adapters_names()
            self.resident.compare_remembered(version)  # the model's own weights, which no load brings again
            if staged.seal is not None:
                adapter = ResidentAdapter(self.model_runner.model, weights, staged.peft)
                self.resident.check_adapter(adapter, version, self.vllm_config.parallel_config.pipeline_parallel_size)
        try:
            with rebound(bucketed_weight_transfer, BucketedWeightReceiver=receiver):
                self.update_weights_from_ipc(**options, use_shm=True)
            assert self.mapped_memory is not None
            self.mapped_memory.check(staged)
            if adapter is not None:
                self.resident.adapter_loaded(adapter, staged)
            elif is_model:
                self.resident.loaded(cache.plan, staged, weights)
            for proposer in self._proposers():
                proposer.committed(version)
        except SealError:
            self.plan_cache = None  # the model's own loaders load next
            raise
        return began


def nothing_kept() -> None:
    """For devices whose workers put their memory away when vLLM puts them to sleep."""


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
        *,
        copied: Callable[[LoadPlan | None], None] = lambda plan: None,
    ) -> None:
        self.weights, self.bucket_bytes, self.device = weights, bucket_bytes, device
        self.cache, self.models, self.copied = cache, models, copied

    def receive_weights(self, on_bucket_received: Callable[[Weights, bool], None]) -> None:
        if self.cache.load(self.weights, self.models):
            # In place: the engine keeps what it has for its next step, which the trainer beside it might take.
            get_torch_device().synchronize()
            self.copied(self.cache.plan)
            return
        with self.cache.recording(self.models) as next_bucket:
            self.load_buckets(on_bucket_received, next_bucket)
        get_torch_device().synchronize()
        get_torch_device().empty_cache()
        self.copied(self.cache.plan)

    def load_buckets(
        self, on_bucket_received: Callable[[Weights, bool], None], next_bucket: Callable[[Weights], None]
    ) -> None:
        for bucket, is_last in self.buckets():
            # Copied also where the device is the host: the memory is written again, and a loader may keep a weight.
            on_device = [(name, weight.to(self.device, copy=True)) for name, weight in bucket]
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
