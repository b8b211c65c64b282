"""The host as verl's "device module": what `verl.utils.device.get_torch_device()` returns on CPU.

verl asks it for streams, memory figures and random states, as it asks `torch.cuda`. Streams, synchronisation and
current_device come from `torch.cpu`; memory is this process's resident set.
"""

from __future__ import annotations

import resource
from types import ModuleType
from typing import Any

import psutil
import torch


class HostDevice(ModuleType):
    """`torch.cpu` with the names that verl expects of an accelerator's namespace."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        return 1

    def empty_cache(self) -> None:
        """The host allocator returns memory to the system by itself."""

    def ipc_collect(self) -> None:
        """No device memory is shared between processes."""

    def set_per_process_memory_fraction(self, fraction: float, device: object = None) -> None:
        """The host has no per-process device budget to set."""

    def get_device_name(self, device: object = None) -> str:
        return "cpu"

    def memory_allocated(self, device: object = None) -> int:
        """Resident bytes of this process."""
        return int(psutil.Process().memory_info().rss)

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: object = None) -> int:
        """Peak resident bytes of this process (getrusage gives KiB on Linux)."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = max_memory_allocated

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """(available, total) bytes of the host."""
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.random.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.random.set_rng_state(state)


HOST_DEVICE = HostDevice("seamless_verl.platform.host_device.HOST_DEVICE")
