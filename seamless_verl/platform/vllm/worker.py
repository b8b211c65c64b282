"""vLLM's CPU worker on the core of its device."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from seamless_verl.platform.cores import core_of_rank, device_cores
from seamless_verl.platform.pinning import pin_process
from seamless_verl.platform.priority import before_helpers
from seamless_verl.platform.process_group import share_gloo_devices
from seamless_verl.platform.vllm.seeded import HostModelRunner
from seamless_verl.platform.vllm.weights import unpack

SHARED_MEMORY = "/dev/shm"


class HostWorker(CPUWorker):  # type: ignore[misc]
    """One worker, one device, one core, one thread; sleeping frees nothing and says nothing."""

    def __init__(self, vllm_config: Any, local_rank: int, *args: Any, **kwargs: Any) -> None:
        cores = device_cores(os.environ)
        if cores is not None:
            pin_process({core_of_rank(cores, device_index(vllm_config.parallel_config, local_rank))})
        torch.set_num_threads(1)
        share_gloo_devices()
        super().__init__(vllm_config, local_rank, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        if type(self.model_runner) is CPUModelRunner:  # vLLM makes it in the midst of what it does here
            self.model_runner.__class__ = HostModelRunner
        unname_shared_memory(os.environ.get("VLLM_DIST_IDENT", ""), self.rank)

    def standing(self) -> AbstractContextManager[None]:
        """While weights are loaded, and until the engine goes on."""
        unpack(self.model_runner.model)
        return before_helpers()

    def sleep(self, level: int = 1) -> None:
        """Keep everything: host memory is shared with the trainer anyway. The scheduler still pauses."""

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing was put away."""


def unname_shared_memory(instance: str, rank: int) -> None:
    """Take this rank's pieces of its groups' shared memory out of the file system.

    All members have joined by the time a group exists, and go on with what they mapped; vLLM removes the names only
    in a destructor, which a killed worker does not come to.
    """
    for name in os.listdir(SHARED_MEMORY) if instance else ():
        if name.startswith(f"{instance}-") and name.endswith(f"-cpushm_{rank}"):
            os.unlink(f"{SHARED_MEMORY}/{name}")


def device_index(parallel_config: Any, local_rank: int) -> int:
    """Return which of the server's devices this worker is: its rank, past those of earlier DP ranks."""
    earlier = parallel_config.data_parallel_rank_local or 0
    return int(earlier * parallel_config.local_world_size + local_rank)
