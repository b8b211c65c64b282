"""The accelerators of this machine that a run may use: what its driver lists, and CUDA_VISIBLE_DEVICES.

CUDA silently ends the list at the first entry that names no device: here such a list is refused. So are parts of a
device (MIG): NCCL takes one part of a device at most, and what the driver says of memory is the whole device's.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from seamless_verl.errors import ConfigError

VARIABLE, ORDER, PCI = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
QUERY = ("--query-gpu=index,uuid,memory.total,mig.mode.current", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class InstalledDevice:
    """One device: its index on the PCI bus, its UUID, its memory, and whether it is divided into parts (MIG)."""

    index: int
    uuid: str
    memory_bytes: int
    divided: bool = False


def installed_devices() -> tuple[InstalledDevice, ...]:
    """What the NVIDIA driver lists; empty where there is none, or it does not respond."""
    command = shutil.which("nvidia-smi")
    return () if command is None else _listed(command)


@cache
def _listed(command: str) -> tuple[InstalledDevice, ...]:
    try:
        done = subprocess.run([command, *QUERY], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ()  # the driver does not respond
    return parse_devices(done.stdout) if done.returncode == 0 else ()


def parse_devices(text: str) -> tuple[InstalledDevice, ...]:
    """The devices in nvidia-smi's lines `index, uuid, MiB, MIG mode`; other lines are left out."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdigit() and fields[2].isdigit():
            divided = fields[3].lower() == "enabled"
            found.append(InstalledDevice(int(fields[0]), fields[1], int(fields[2]) * 2**20, divided))
    return tuple(found)


def visible_devices(installed: Sequence[InstalledDevice], value: str | None) -> tuple[InstalledDevice, ...]:
    """Those of the installed devices that CUDA_VISIBLE_DEVICES=`value` names, in its order; None names all.

    Raises:
        ConfigError: it names none, one that is absent, one twice, or a part of a device.
    """
    entries = [device.index for device in installed] if value is None else value.split(",")
    found = [_device(installed, str(entry).strip(), value) for entry in entries if str(entry).strip()]
    if not found:
        raise ConfigError(VARIABLE, value, "names no device", f"Unset it, or name some of {_names(installed)}")
    twice = next((device for i, device in enumerate(found) if device in found[:i]), None)
    if twice is not None:
        raise ConfigError(VARIABLE, value, f"names device {twice.index} twice", "Name each device once")
    return tuple(found)


def order_problem(installed: Sequence[InstalledDevice], value: str | None, order: str | None) -> str | None:
    """Why indices do not say which devices are meant; None where they do.

    By default CUDA counts the fastest device first, and the driver's list goes by the PCI bus.
    """
    by_index = value is not None and not value.strip().startswith("GPU-")
    differ = len({device.memory_bytes for device in installed}) > 1
    if not (by_index and differ) or order == PCI:
        return None
    return "this machine's devices differ, and CUDA does not count them in the order of nvidia-smi"


def _device(installed: Sequence[InstalledDevice], entry: str, value: str | None) -> InstalledDevice:
    if entry.startswith("MIG-"):
        way_out = "Name whole devices, with MIG switched off: nvidia-smi -mig 0"
        raise ConfigError(VARIABLE, value, f"{entry} is a part of a device (MIG)", way_out)
    named = [device for device in installed if entry in (str(device.index), device.uuid)]
    if not named:
        way_out = f"Name some of {_names(installed)}, or whole UUIDs as nvidia-smi -L prints them"
        raise ConfigError(VARIABLE, value, f"{entry} is no device of this machine", way_out)
    if named[0].divided:
        way_out = f"Switch it off (nvidia-smi -i {named[0].index} -mig 0), or leave the device out of {VARIABLE}"
        raise ConfigError(VARIABLE, value, f"device {named[0].index} is divided into parts (MIG)", way_out)
    return named[0]


def _names(installed: Sequence[InstalledDevice]) -> str:
    return ",".join(str(device.index) for device in installed)
