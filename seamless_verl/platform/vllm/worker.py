"""vLLM's CPU worker on the core of its device, and its model runner for requests with a seed.

The worker is pinned to one core and computes with one thread. Around a load of weights it may run with real-time
priority, and it unlinks its shared memory as soon as all ranks have joined.

The model runner serves seeded requests whose prefill is cut into chunks. vLLM samples for every request of a batch,
also for one whose prompt is not all computed yet, discards that token, and sets the request's generator back by an
offset, which the generators of accelerators have. A CPU's generator has none, and the engine would end with an error.
Here the generator's whole state is restored instead, before vLLM does so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from seamless_verl.platform.cores import core_of_rank, device_cores, pin_process, real_time_priority
from seamless_verl.platform.process_group import share_gloo_devices
from seamless_verl.platform.vllm.drafts import verify_drafts_on_host
from seamless_verl.platform.vllm.routes import report_routes
from seamless_verl.platform.vllm.weights import free_packed_weights

SHARED_MEMORY = "/dev/shm"
LIBC = ctypes.CDLL(None, use_errno=True)


class HostModelRunner(CPUModelRunner):  # type: ignore[misc]
    """vLLM's runner on the CPU, whose seeded requests draw once for each token that they keep."""

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        before = [(generator, generator.get_state()) for generator in self._discarded_generators().values()]
        output = super()._sample(*args, **kwargs)
        for generator, state in before:
            generator.set_state(state)
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, without the generators that it would restore."""
        hidden = self._discarded_generators()
        for index in hidden:
            del self.input_batch.generators[index]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators.update(hidden)

    def init_routed_experts_capturer(self) -> None:
        report_routes()
        super().init_routed_experts_capturer()

    def _discarded_generators(self) -> dict[int, torch.Generator]:
        """Generators of the requests whose sampled token will not be kept, by their place in the batch."""
        (places,) = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
        generators = self.input_batch.generators
        return {int(place): generators[int(place)] for place in places if int(place) in generators}


class HostWorker(CPUWorker):  # type: ignore[misc]
    """One worker, one device, one core, one thread; sleeping frees nothing and logs nothing."""

    def __init__(self, vllm_config: Any, local_rank: int, *args: Any, **kwargs: Any) -> None:
        cores = device_cores(os.environ)
        if cores is not None:
            pin_process({core_of_rank(cores, device_index(vllm_config.parallel_config, local_rank))})
        torch.set_num_threads(1)
        share_gloo_devices()
        super().__init__(vllm_config, local_rank, *args, **kwargs)
        self.priority = ExitStack()  # holds real-time priority from a load until the next step

    def init_device(self) -> None:
        super().init_device()
        if type(self.model_runner) is CPUModelRunner:  # vLLM makes it inside of `init_device`
            self.model_runner.__class__ = HostModelRunner
        if self.vllm_config.speculative_config is not None:
            verify_drafts_on_host()
        unlink_shared_memory(os.environ.get("VLLM_DIST_IDENT", ""), self.rank)

    def before_load(self, models: Sequence[torch.nn.Module], *, planned: bool) -> None:
        """Free the packed weights of these models; with `planned`, take real-time priority until the next step.

        Not beside other workers, which all spin while they wait for a message: the engine's own process would not get a
        core from them.
        """
        for model in models:
            free_packed_weights(model)
        self.priority.close()
        if planned and self.vllm_config.parallel_config.world_size == 1:
            self.priority.enter_context(real_time_priority())

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.priority.close()
        return super().execute_model(*args, **kwargs)

    def execute_dummy_batch(self) -> None:
        """A step of an engine without requests, beside data-parallel ones that generate."""
        self.priority.close()
        super().execute_dummy_batch()

    def sleep(self, level: int = 1) -> None:
        """Keep everything: host memory is shared with the trainer anyway. The scheduler still pauses."""

    def drop_kept_memory(self) -> None:
        """Give weights and KV cache back to the host: what an accelerator's sleep mode does, addresses included.

        Both read as zeros until the weights are loaded again.
        """
        model = self.model_runner.model
        free_packed_weights(model)
        for tensor in model.parameters():
            drop_pages(tensor)
        self.drop_cache()

    def drop_cache(self) -> None:
        """Give the KV cache back to the host; it reads as zeros."""
        for tensor in tensors_in(self.model_runner.kv_caches):
            drop_pages(tensor)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing was put away."""


def tensors_in(nested: Any) -> Iterator[torch.Tensor]:
    """The tensors of a KV cache, which is a list of tensors or of lists of them."""
    if isinstance(nested, torch.Tensor):
        yield nested
    else:
        for item in nested:
            yield from tensors_in(item)


def drop_pages(tensor: torch.Tensor) -> None:
    """Give the whole pages of the tensor's private memory back to the host; they read as zeros afterwards.

    Raises:
        OSError: the host refuses.
    """
    storage, page = tensor.untyped_storage(), mmap.PAGESIZE
    begin = -(-storage.data_ptr() // page) * page
    size = (storage.data_ptr() + storage.nbytes() - begin) // page * page
    if size > 0 and LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), f"madvise of {size} bytes")


def unlink_shared_memory(instance: str, rank: int) -> None:
    """Remove the names of this rank's pieces of its groups' shared memory from the file system.

    All members have joined by the time a group exists, and keep what they mapped. vLLM removes the names only in a
    destructor, which a killed worker does not reach.
    """
    for name in os.listdir(SHARED_MEMORY) if instance else ():
        if name.startswith(f"{instance}-") and name.endswith(f"-cpushm_{rank}"):
            os.unlink(f"{SHARED_MEMORY}/{name}")


def device_index(parallel_config: Any, local_rank: int) -> int:
    """Return which of the server's devices this worker is: its rank, past those of earlier DP ranks."""
    earlier = parallel_config.data_parallel_rank_local or 0
    return int(earlier * parallel_config.local_world_size + local_rank)
