"""vLLM's CPU platform with devices: an engine's workers run on the cores of the devices it was given.

An out-of-tree platform is vLLM's own way of extending one (entry point `vllm.platform_plugins`). Without
`SEAMLESS_VISIBLE_DEVICES` workers are not pinned.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

from vllm.platforms.cpu import CpuPlatform

from seamless_verl.platform.cores import (
    CPU_CORES,
    VISIBLE_DEVICES,
    core_of_rank,
    device_cores,
    real_time_priority,
    thread_binding,
)

WORKER = "seamless_verl.platform.vllm.worker.HostWorker"


class HostPlatform(CpuPlatform):  # type: ignore[misc]
    """Devices are pinned cores, and an engine of one device is one process."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        # Child processes inherit this: once they are pinned, their own affinity no longer lists the job's cores.
        os.environ.setdefault(CPU_CORES, ",".join(map(str, sorted(os.sched_getaffinity(0)))))
        if VISIBLE_DEVICES in os.environ:
            place_engine(vllm_config.parallel_config, device_cores(os.environ))

    @staticmethod
    def real_time_priority() -> AbstractContextManager[None]:
        """For a server whose engine is paused until the server resumes it."""
        return real_time_priority()

    def is_sleep_mode_available(self) -> bool:
        """True: the scheduler pauses and the worker keeps its memory, so verl's default config runs."""
        return True


def place_engine(parallel: Any, cores: tuple[int, ...] | None) -> None:
    """Give every worker of the engine one of `cores`, or with None leave all of them free.

    An engine of one device runs its worker inside the engine's core process. A worker process of
    its own would contend with it: both spin for a second after every message, and on a host they
    spin on the cores that compute.

    Raises:
        ConfigError: the engine has more workers than the server has devices.
    """
    if cores is not None:
        core_of_rank(cores, parallel.local_world_size * (parallel.data_parallel_size_local or 1) - 1)
    # Its default, "auto", would put every engine of the host on the same core.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind" if cores is None else thread_binding(cores)
    parallel.worker_cls = WORKER
    if parallel.world_size == 1:
        parallel.distributed_executor_backend = "uni"
