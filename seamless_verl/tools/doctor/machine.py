"""Probes of the machine: devices, memory, limits of a process, shared memory, temporary files, disks."""

from __future__ import annotations

import os

from seamless_verl.errors import ConfigError
from seamless_verl.resources.visible_devices import ORDER, PCI, VARIABLE, order_problem, visible_devices
from seamless_verl.runtime.scratch import FALLBACK, PROCESS_SOCKETS, RAY_SOCKETS, max_parent_bytes
from seamless_verl.tools.doctor.facts import Facts, FileSystem, Judgement, error, ok, warning

GIB = 2**30
THREADS = "OMP_NUM_THREADS"
NEEDED_MEMORY = 8 * GIB  # docs/cpu.md, for the smallest model
LEAST_FILES, ENOUGH_FILES = 1024, 8192  # Ray's warning recommends the second
RAISED_FILES = 65536  # to which Ray raises the soft limit, as far as the hard one allows
ENOUGH_TASKS = 4096  # threads and processes: each of Ray's workers has dozens
LEAST_SHARED = 256 << 20  # vLLM's queue between an engine and its workers: 10 chunks of 16 MiB
STORE_SHARE = 0.3  # of the memory that Ray takes for its object store (ray_constants.py, 2.60)
SLOW_STORE = 10 * 10**9  # above it Ray fits the store to /dev/shm; up to it, it takes the disk
LEAST_FREE, ENOUGH_FREE = GIB, 10 * GIB
RAY_FULL = 0.95  # of a disk, from which on Ray does not spill objects (local_fs_capacity_threshold)
LEAST_FREE_FILES = 10_000
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs")


def probe_devices(facts: Facts) -> list[Judgement]:
    return _cores(facts) if facts.on_cpu else _accelerators(facts)


def _cores(facts: Facts) -> list[Judgement]:
    threads = facts.environ.get(THREADS)
    if threads is None or threads.strip() == "1":
        return ok(f"{facts.cores} cores that a run may use as devices")
    text = f"{THREADS}={threads!r}: each process would compute with so many threads on the one core of its device"
    return warning(text, f"Unset it, or set {THREADS}=1")


def _accelerators(facts: Facts) -> list[Judgement]:
    value, order = facts.environ.get(VARIABLE), facts.environ.get(ORDER)
    if not facts.devices:
        return _no_devices(facts)
    try:
        visible = visible_devices(facts.devices, value)
    except ConfigError as mistake:
        return error(f"{mistake.key}={mistake.value!r}: {mistake.reason}", mistake.way_out)
    if (reason := order_problem(facts.devices, value, order)) is not None:
        return warning(f"{ORDER}={order!r}: {reason}", f"Set {ORDER}={PCI}")
    sizes = sorted({gib(device.memory_bytes) for device in visible})
    return ok(f"{len(visible)} with {' or '.join(sizes)} each{'' if value is None else f' in {VARIABLE}={value}'}")


def _no_devices(facts: Facts) -> list[Judgement]:
    if facts.nvidia_files:
        text = "the NVIDIA driver has devices in /dev, and nvidia-smi lists none"
        return error(text, "Run nvidia-smi and mend what it says, or install it beside the driver")
    if facts.other_files:
        text = "accelerators that are not NVIDIA's: nothing of this package was tested with them"
        return warning(text, "Use NVIDIA devices for what is documented")
    if facts.joins_named_cluster:
        return ok("none here: those of the cluster in RAY_ADDRESS are not looked at")
    return []  # reported by the probe of the platform


def probe_memory(facts: Facts) -> list[Judgement]:
    total, available = facts.memory, facts.memory_available
    if total is None:
        return ok(f"{gib(available)} available")
    text = f"{gib(total)}, of which {gib(available)} are available"
    if total < NEEDED_MEMORY:
        way_out = f"Use a machine, or a container's limit, of {gib(NEEDED_MEMORY)} or more"
        return warning(f"{text}: the smallest run needs {gib(NEEDED_MEMORY)}", way_out)
    if available < NEEDED_MEMORY / 2:
        return warning(f"{text}: other programs have the rest", "End those that you do not need")
    return ok(text)


def probe_open_files(facts: Facts) -> list[Judgement]:
    """What a process of the run may open: Ray raises the soft limit as far as the hard one allows."""
    soft, hard = facts.open_files
    if soft is None:
        return ok("no limit")
    most = max(soft, min(RAISED_FILES if hard is None else hard, RAISED_FILES))
    if most >= ENOUGH_FILES:
        return ok(f"at most {most} in a process")
    text = f"at most {most} in a process, and each call of an agent takes one in the gateway"
    way_out = f"ulimit -Hn {RAISED_FILES} before the run; for a container --ulimit nofile={RAISED_FILES}"
    return error(text, way_out) if most < LEAST_FILES else warning(text, way_out)


def probe_processes(facts: Facts) -> list[Judgement]:
    """Threads and processes, by the user's limit and by that of a container."""
    found, dozens = list[Judgement](), "and each of Ray's workers has dozens"
    if facts.processes is not None and facts.processes < ENOUGH_TASKS:
        text = f"this user may have {facts.processes} processes and threads, {dozens}"
        found += warning(text, f"ulimit -u {ENOUGH_TASKS} before the run, or unlimited")
    if facts.container_tasks is not None and facts.container_tasks < ENOUGH_TASKS:
        text = f"this container may start {facts.container_tasks} more, {dozens}"
        found += warning(text, "Start the container with --pids-limit -1")
    return found or ok("enough threads and processes allowed")


def probe_locked_memory(facts: Facts) -> list[Judgement]:
    """On accelerators staged weights are pinned, once for each process that maps them."""
    if facts.on_cpu:
        return []
    if facts.locked_memory is None:
        return ok("no limit")
    text = f"{gib(facts.locked_memory)} may be locked: staged weights beyond that are not pinned, and load more slowly"
    return warning(text, "ulimit -l unlimited; for a container --ulimit memlock=-1")


def probe_shared_memory(facts: Facts) -> list[Judgement]:
    """/dev/shm holds vLLM's queues, NCCL's buffers between devices of a host, and Ray's object store."""
    found = facts.shared_memory
    if found is None:
        return error("there is no /dev/shm", "Mount it: mount -t tmpfs shm /dev/shm")
    text = f"/dev/shm has {gib(found.free)} free of {gib(found.size)}"
    more = "Free some: rm what ended programs left there. For a container --shm-size or --ipc=host"
    if found.free < LEAST_SHARED:
        why = f"an engine's queue to its workers may take {gib(LEAST_SHARED)}, and ends with SIGBUS without it"
        return error(f"{text}: {why}", more)
    wanted = min(int(STORE_SHARE * facts.memory_available), SLOW_STORE)
    if found.free < wanted:
        return warning(f"{text}: Ray would keep its objects of up to {gib(wanted)} on a disk, which is slower", more)
    return ok(text)


def probe_temporary(facts: Facts) -> list[Judgement]:
    """TMPDIR can be written, is short enough for sockets, and is on a disk of this machine."""
    found, asked, folder = facts.temporary, facts.environ.get("TMPDIR"), facts.temporary.folder
    if folder is None:
        return error("no folder for temporary files can be written", "Set TMPDIR to a folder of yours")
    if asked and os.path.abspath(asked) != os.path.abspath(folder):
        text = f"TMPDIR={asked!r} cannot be used, so temporary files go to {folder}"
        return warning(text, "Make that folder, or unset TMPDIR")
    if found.write_error or found.socket_error:
        what = "be written" if found.write_error else "hold sockets"
        text = f"{folder} cannot {what}: {found.write_error or found.socket_error}"
        return error(text, "Set TMPDIR to a folder of yours on a disk of this machine")
    problems = list[Judgement]()
    length, ray, own = len(os.fsencode(folder)), max_parent_bytes(RAY_SOCKETS), max_parent_bytes(PROCESS_SOCKETS)
    if length > ray:  # runtime/scratch.py moves what has no room to /tmp
        moved = "Ray's session is" if length <= own else "all temporary files of a run are"
        text = f"{folder} has {length} bytes, too many for the paths of sockets: {moved} in {FALLBACK} instead"
        problems += warning(text, f"Set TMPDIR to a folder of at most {ray} bytes")
    if found.kind in REMOTE or found.kind.startswith("fuse."):
        text = f"{folder} is on {found.kind}: locks, logs and agents' folders would go over the network"
        problems += warning(text, "Set TMPDIR to a folder on a disk of this machine")
    if "noexec" in found.options:
        text = f"{folder} is mounted noexec: what agents and compilers write there cannot be run"
        problems += warning(text, "Set TMPDIR to a folder of another mount, or mount it with exec")
    return problems or ok(folder)


def probe_disks(facts: Facts) -> list[Judgement]:
    """Room for temporary files and for what a run leaves; one judgement for each file system."""
    by_device: dict[int, list[FileSystem]] = {}
    for one in facts.file_systems:
        by_device.setdefault(one.device, []).append(one)
    return [judgement for same in by_device.values() for judgement in _disk(same)]


def _disk(same: list[FileSystem]) -> list[Judgement]:
    one = same[0]
    text = f"{gib(one.free)} free for {' and '.join(f'{each.use} in {each.folder}' for each in same)}"
    way_out = "Free some, or choose another disk: TMPDIR, trainer.default_local_dir and hydra.run.dir name the folders"
    if one.free < LEAST_FREE:
        return error(text, way_out)
    if one.free_files is not None and one.free_files < LEAST_FREE_FILES:
        return warning(f"{text}, but only {one.free_files} more files", way_out)
    if one.free < ENOUGH_FREE:
        return warning(f"{text}: a checkpoint has the optimizer's state beside the weights", way_out)
    if one.free < (1 - RAY_FULL) * one.size:
        return warning(f"{text}: beyond {RAY_FULL:.0%} full, Ray does not spill objects to it", way_out)
    return ok(text)


def gib(size: int) -> str:
    """Bytes in GiB; in MiB where that is less than one."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size >> 20} MiB"
