"""Everything of vLLM that the CPU platform replaces, overrides or relies on, as data for the contract test.

It is apart from `platform.py`, which vLLM imports while vLLM itself is being imported, and which therefore cannot be
imported first.
"""

from __future__ import annotations

from seamless_verl.platform.adaptation import Adaptation
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
    "our platform class is used exactly where vLLM would choose its own CPU platform",
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
    "HostWorker unlinks these names once all ranks have joined, so that no killed worker leaves them behind",
    "(communicator: vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator) -> str",
)
SEEDED_SAMPLE = Adaptation(
    "vllm-seeded-sample",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
    VLLM,
    "HostModelRunner restores the generators whose token is discarded; a CPU's generator has no offset",
    "(self, logits: torch.Tensor | None,"
    " spec_decode_metadata: vllm.v1.spec_decode.metadata.SpecDecodeMetadata | None)"
    " -> vllm.v1.outputs.SamplerOutput",
)
SEEDED_BOOKKEEPING = Adaptation(
    "vllm-seeded-bookkeeping",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
    VLLM,
    "HostModelRunner hides from it the generators that it would restore by an offset",
    "(self, scheduler_output: 'SchedulerOutput', sampler_output: vllm.v1.outputs.SamplerOutput,"
    " logits: torch.Tensor | None, hidden_states: torch.Tensor, num_scheduled_tokens: int)",
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
    SEEDED_BOOKKEEPING,
)
