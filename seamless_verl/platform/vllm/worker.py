"""vLLM's CPU worker on the core of its device."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from seamless_verl.platform.cores import core_of_rank, device_cores
from seamless_verl.platform.pinning import pin_process


class HostWorker(CPUWorker):  # type: ignore[misc]
    """One worker, one device, one core, one thread; sleeping frees nothing and says nothing."""

    def __init__(self, vllm_config: Any, local_rank: int, *args: Any, **kwargs: Any) -> None:
        cores = device_cores(os.environ)
        if cores is not None:
            pin_process({core_of_rank(cores, device_index(vllm_config.parallel_config, local_rank))})
        torch.set_num_threads(1)
        super().__init__(vllm_config, local_rank, *args, **kwargs)

    def sleep(self, level: int = 1) -> None:
        """Keep everything: host memory is shared with the trainer anyway. The scheduler still pauses."""

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing was put away."""


def device_index(parallel_config: Any, local_rank: int) -> int:
    """Return which of the server's devices this worker is: its rank, past those of earlier DP ranks."""
    earlier = parallel_config.data_parallel_rank_local or 0
    return int(earlier * parallel_config.local_world_size + local_rank)
