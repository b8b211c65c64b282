"""verl's two Megatron engines on the host: those in plain torch, on the core of the process's device.

Megatron is adapted before the engine's state is made and again before its model is built, because verl imports more of
Megatron in between.
"""

from __future__ import annotations

import os
from typing import Any

from seamless_verl.platform.cores import CPU_CORES, VISIBLE_DEVICES, device_cores, pin_process
from seamless_verl.platform.megatron.adapt import adapt_megatron, multiply_bf16_in_fp32
from seamless_verl.platform.megatron.engines import TorchMegatronEngine, TorchMegatronValueEngine


class HostEngineMixin:
    """What the host adds to an engine: adaptations, fast products of bf16, and the core of its device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        adapt_megatron()
        multiply_bf16_in_fp32()
        pin_to_device()
        super().__init__(*args, **kwargs)

    def prepare(self) -> None:
        super().prepare()  # type: ignore[misc]
        adapt_megatron()


class HostMegatronEngine(HostEngineMixin, TorchMegatronEngine):
    """Megatron's language model engine on the host."""


class HostMegatronValueEngine(HostEngineMixin, TorchMegatronValueEngine):
    """Megatron's value model engine on the host."""


def pin_to_device() -> None:
    """Pin this process to the core of the device that Ray gave it; outside Ray, do nothing."""
    import ray

    devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", []) if ray.is_initialized() else []
    if not devices:
        return
    job = {CPU_CORES: ",".join(map(str, sorted(os.sched_getaffinity(0)))), **os.environ}
    cores = device_cores({**job, VISIBLE_DEVICES: ",".join(devices)})
    if cores is not None:
        pin_process(cores)
