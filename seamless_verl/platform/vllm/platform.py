"""Everything of vLLM that the CPU platform replaces or overrides, as data for the contract test.

vLLM's CPU platform, told which cores it was given.

An out-of-tree platform is vLLM's own way of extending one (entry point `vllm.platform_plugins`).
Without `SEAMLESS_VISIBLE_DEVICES` this class is the CPU platform unchanged.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

from vllm.platforms.cpu import CpuPlatform

from seamless_verl.platform.adaptation import Adaptation
from seamless_verl.platform.cores import CPU_CORES, VISIBLE_DEVICES, core_of_rank, device_cores, thread_binding
from seamless_verl.platform.real_time import real_time_priority
from seamless_verl.platform.vllm.weights import KEEP_WEIGHTS

VLLM = KEEP_WEIGHTS.written_for

PLACE_ENGINE = Adaptation(
    "vllm-place-engine",
    "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
    VLLM,
    "HostPlatform overrides it to give each worker one core, and one process to an engine of one device",
    "(vllm_config: None) -> None",
)
SLEEP_MODE = Adaptation(
    "vllm-sleep-mode",
    "vllm.platforms.interface:Platform.is_sleep_mode_available",
    VLLM,
    "HostPlatform overrides it, since verl's default config asks for a sleep that here only pauses",
    "(self) -> bool",
)
PINNED_WORKER = Adaptation(
    "vllm-pinned-worker",
    "vllm.v1.worker.cpu_worker:CPUWorker.__init__",
    VLLM,
    "HostWorker pins the process to its device's core first",
    "(self, vllm_config: vllm.config.vllm.VllmConfig, local_rank: int, rank: int, "
    "distributed_init_method: str, is_driver_worker: bool = False)",
)
QUIET_SLEEP = Adaptation(
    "vllm-quiet-sleep",
    "vllm.v1.worker.cpu_worker:CPUWorker.sleep",
    VLLM,
    "HostWorker keeps it a no-op without a warning at every weight update",
    "(self, level: int = 1) -> None",
)
QUIET_WAKE = Adaptation(
    "vllm-quiet-wake",
    "vllm.v1.worker.cpu_worker:CPUWorker.wake_up",
    VLLM,
    "HostWorker keeps it a no-op without a warning at every weight update",
    "(self, tags: list[str] | None = None) -> None",
)
CPU_BUILD = Adaptation(
    "vllm-cpu-build",
    "vllm.platforms:cpu_platform_plugin",
    VLLM,
    "our platform class stands in exactly where vLLM would choose its own CPU platform",
    "() -> str | None",
)
THREAD_BINDING = Adaptation(
    "vllm-thread-binding",
    "vllm.utils.ompmultiprocessing:OMPProcessManager.configure_omp_envs",
    VLLM,
    "it turns VLLM_CPU_OMP_THREADS_BIND, which HostPlatform sets, into one thread a worker",
    "(self, rank: int, local_rank: int)",
)
SHARED_NAMES = Adaptation(
    "vllm-shared-names",
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name",
    VLLM,
    "HostWorker removes what these names are of, once all ranks have joined, so that no killed worker leaves it behind",
    "(communicator: vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator) -> str",
)
SEEDED_SAMPLE = Adaptation(
    "vllm-seeded-sample",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
    VLLM,
    "HostModelRunner puts back the generators whose token is discarded, which a CPU's cannot do by an offset",
    "(self, logits: torch.Tensor | None,"
    " spec_decode_metadata: vllm.v1.spec_decode.metadata.SpecDecodeMetadata | None)"
    " -> vllm.v1.outputs.SamplerOutput",
)
SEEDED_BOOKS = Adaptation(
    "vllm-seeded-books",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
    VLLM,
    "HostModelRunner shows it no generator that it would set back by an offset",
    "(self, scheduler_output: 'SchedulerOutput', sampler_output: vllm.v1.outputs.SamplerOutput,"
    " logits: torch.Tensor | None, hidden_states: torch.Tensor, num_scheduled_tokens: int)"
    " -> tuple[dict[str, int], torch.Tensor | None, vllm.v1.outputs.LogprobsLists | None, list[list[int]],"
    " dict[str, vllm.v1.outputs.LogprobsTensors | None], list[str], dict[str, int], list[int]]",
)
ADAPTATIONS = (
    KEEP_WEIGHTS,
    PLACE_ENGINE,
    SLEEP_MODE,
    PINNED_WORKER,
    QUIET_SLEEP,
    QUIET_WAKE,
    CPU_BUILD,
    THREAD_BINDING,
    SHARED_NAMES,
    SEEDED_SAMPLE,
    SEEDED_BOOKS,
)

WORKER = "seamless_verl.platform.vllm.worker.HostWorker"


class HostPlatform(CpuPlatform):  # type: ignore[misc]
    """Devices are pinned cores, and an engine of one device is one process."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        # The processes to come inherit this: once pinned, their own affinity no longer tells.
        os.environ.setdefault(CPU_CORES, ",".join(map(str, sorted(os.sched_getaffinity(0)))))
        if VISIBLE_DEVICES in os.environ:
            place_engine(vllm_config.parallel_config, device_cores(os.environ))

    @staticmethod
    def going_first() -> AbstractContextManager[None]:
        """For a server whose engine stands still until the server says that it is to go on."""
        return real_time_priority()

    def is_sleep_mode_available(self) -> bool:
        """Yes: the scheduler pauses and the worker keeps its memory, so verl's default config runs."""
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
