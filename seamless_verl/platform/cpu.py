"""verl's platform `cpu`: gloo collectives, host memory, and devices that are pinned cores.

Ray counts the devices under the resource name `GPU`, because verl's availability check knows no other name for them. A
local cluster declares as many as there are cores to pin.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase

from seamless_verl.platform.cores import VISIBLE_DEVICES
from seamless_verl.platform.forkserver.launcher import set_worker_command
from seamless_verl.platform.host_device import HOST_DEVICE
from seamless_verl.platform.without_torchvision import take_images_without_torchvision


class HostIndex(str):
    """The host's device index: the device "cpu" by itself, and the number 0 inside "cpu:<index>".

    verl passes the index to `Tensor.to`, where torch takes a plain integer for an accelerator.
    """

    def __format__(self, spec: str) -> str:
        return "0"


class PlatformCPU(PlatformBase):
    """A host without an accelerator, presented to verl as one device for each process."""

    def __init__(self) -> None:
        if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
            set_worker_command(os.environ)  # before Ray starts, since verl asks for its platform first
            take_images_without_torchvision()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "host"

    @property
    def device_module(self) -> ModuleType:
        return HOST_DEVICE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """False beside an accelerator, and with a torch that was built for one.

        Such a torch may see no accelerator in a process that was given none, as on a cluster's head or in an actor
        without devices. verl asks this only when VERL_PLATFORM names no platform.
        """
        for_accelerators = torch.version.cuda is not None or torch.version.hip is not None
        if for_accelerators or torch.cuda.is_available() or self.check_smi_command("nvidia-smi"):
            return False
        set_worker_command(os.environ)  # verl takes the first available platform, and this is the last
        take_images_without_torchvision()
        return True

    def current_device(self) -> int:
        return HostIndex("cpu")  # type: ignore[return-value]  # see HostIndex

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """A process's device is its affinity, set when the process starts."""

    def synchronize(self, device_index: int | None = None) -> None:
        """The host computes synchronously."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        """The host allocator has no such settings."""

    def empty_cache(self) -> None:
        HOST_DEVICE.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return VISIBLE_DEVICES

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """False: verl then moves weights between colocated processes through shared memory."""
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        """Environment of every rollout server: eager kernels, and no thread pool beyond its cores."""
        return {"TORCHDYNAMO_DISABLE": os.environ.get("TORCHDYNAMO_DISABLE", "1")}

    def cudart(self) -> Any:
        return None
