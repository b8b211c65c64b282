"""Probes of the machine: devices, memory, clock, limits of a process, shared memory, temporary files, disks."""

from __future__ import annotations

import os

from seamless_verl.errors import ConfigError, Finding, Level
from seamless_verl.resources.visible_devices import ORDER, PCI, VARIABLE, order_problem, visible_devices
from seamless_verl.runtime.scratch import FALLBACK, PROCESS_SOCKETS, RAY_SOCKETS, max_parent_bytes
from seamless_verl.tools.doctor.gather import ClockFacts, Facts, FileSystemFacts

GIB = 2**30
THREADS = "OMP_NUM_THREADS"
HUGE_TENSORS = "THP_MEM_ALLOC_ENABLE"  # torch's: its allocator then asks for transparent huge pages
NEEDED_MEMORY = 8 * GIB  # docs/cpu.md, for the smallest model
RESERVED_SHARE = 0.05  # of memory in reserved huge pages, which nothing of a run takes
CLOCK_ERROR_S = 0.1  # between machines: the shares of the ledger's shortest stages
FILES_AHEAD_S = 60.0  # a server of files may have another clock
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


def probe_devices(facts: Facts) -> list[Finding]:
    return _cores(facts) if facts.software.cpu else _accelerators(facts)


def _cores(facts: Facts) -> list[Finding]:
    cores, threads = facts.machine.cores, facts.environ.get(THREADS)
    found = [Finding("devices", Level.OK, f"{cores} cores that a run may use as devices")]
    if threads is not None and threads.strip() != "1":
        text = f"{THREADS}={threads!r}: each process would compute with so many threads on the one core of its device"
        found = [Finding("devices", Level.WARNING, text, f"Unset it, or set {THREADS}=1")]
    return found


def _accelerators(facts: Facts) -> list[Finding]:
    machine, value = facts.machine, facts.environ.get(VARIABLE)
    if not machine.devices:
        if machine.nvidia_files:
            text = "the NVIDIA driver has devices in /dev, and nvidia-smi lists none"
            return [
                Finding(
                    "devices",
                    Level.ERROR,
                    text,
                    "Run nvidia-smi and mend what it says, or install it beside the driver",
                )
            ]
        if machine.other_files:
            text = "accelerators that are not NVIDIA's: nothing of this package was tested with them"
            return [Finding("devices", Level.WARNING, text, "Use NVIDIA devices for what is documented")]
        if facts.joins_named_cluster:
            return [Finding("devices", Level.OK, "none here: those of the cluster in RAY_ADDRESS are not looked at")]
        return []  # reported by the probe of the platform
    try:
        visible = visible_devices(machine.devices, value)
    except ConfigError as mistake:
        return [Finding.of("devices", mistake)]
    order = facts.environ.get(ORDER)
    if (reason := order_problem(machine.devices, value, order)) is not None:
        return [Finding("devices", Level.WARNING, f"{ORDER}={order!r}: {reason}", f"Set {ORDER}={PCI}")]
    sizes = sorted({gib(device.memory_bytes) for device in visible})
    of_list = "" if value is None else f" in {VARIABLE}={value}"
    return [Finding("devices", Level.OK, f"{len(visible)} with {' or '.join(sizes)} each{of_list}")]


def probe_memory(facts: Facts) -> list[Finding]:
    total, available = facts.machine.memory, facts.machine.memory_available
    if total is None:
        return [Finding("memory", Level.OK, f"{gib(available)} available")]
    text = f"{gib(total)}, of which {gib(available)} are available"
    if total < NEEDED_MEMORY:
        way_out = f"Use a machine, or a container's limit, of {gib(NEEDED_MEMORY)} or more"
        return [Finding("memory", Level.WARNING, f"{text}: the smallest run needs {gib(NEEDED_MEMORY)}", way_out)]
    if available < NEEDED_MEMORY / 2:
        return [
            Finding("memory", Level.WARNING, f"{text}: other programs have the rest", "End those that you do not need")
        ]
    return [Finding("memory", Level.OK, text)]


def probe_huge_pages(facts: Facts) -> list[Finding]:
    """Reserved huge pages are lost to a run, and transparent ones come as the kernel's mode says."""
    machine, asked = facts.machine, facts.environ.get(HUGE_TENSORS) == "1"
    if machine.memory and machine.reserved_huge > RESERVED_SHARE * machine.memory:
        text = f"{gib(machine.reserved_huge)} of memory are reserved as huge pages, which nothing of a run takes"
        return [Finding("huge pages", Level.WARNING, text, "Give them back: sysctl vm.nr_hugepages=0")]
    mode = machine.transparent_huge
    if asked and mode == "never":
        text = f"{HUGE_TENSORS}=1 asks for transparent huge pages, and the kernel gives none"
        way_out = f"echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, or unset {HUGE_TENSORS}"
        return [Finding("huge pages", Level.WARNING, text, way_out)]
    reserved = gib(machine.reserved_huge) if machine.reserved_huge else "none"
    return [Finding("huge pages", Level.OK, f"{reserved} reserved, transparent ones: {mode or 'not known'}")]


def probe_clock(facts: Facts) -> list[Finding]:
    """Machines of one run agree about the time, by which device-seconds and journals are ordered."""
    clock = facts.clock
    if clock.behind_files > FILES_AHEAD_S:
        text = f"it is {clock.behind_files:.0f} s behind the time of this package's files"
        return [Finding("clock", Level.WARNING, text, "Set it: timedatectl set-ntp true, or date -s")]
    if clock.synchronized and (clock.max_error is None or clock.max_error <= CLOCK_ERROR_S):
        return [Finding("clock", Level.OK, "synchronized, as the kernel has it")]
    way_out = "Run an NTP client on every machine, such as chrony"
    if clock.synchronized is None:
        text = f"not known whether it is synchronized: the kernel does not say, and {_clients(clock)}"
        return [Finding("clock", Level.NOTE, text, way_out)]
    state = f"may be {clock.max_error:.1f} s off" if clock.synchronized else "is not synchronized, as the kernel has it"
    if not facts.joins_named_cluster:
        return [
            Finding("clock", Level.NOTE, f"{state}, and {_clients(clock)}; that matters only between machines", way_out)
        ]
    text = f"{state}, and {_clients(clock)}; the devices' time is added up over the machines of RAY_ADDRESS"
    return [Finding("clock", Level.WARNING, text, way_out)]


def _clients(clock: ClockFacts) -> str:
    """A container does not see those of its host."""
    return f"{' and '.join(clock.clients)} runs" if clock.clients else "no NTP client is seen to run here"


def probe_open_files(facts: Facts) -> list[Finding]:
    """What a process of the run may open: Ray raises the soft limit as far as the hard one allows."""
    soft, hard = facts.limits.open_files
    if soft is None:
        return [Finding("open files", Level.OK, "no limit")]
    most = max(soft, min(RAISED_FILES if hard is None else hard, RAISED_FILES))
    text = f"at most {most} in a process, and each call of an agent takes one in the gateway"
    way_out = f"ulimit -Hn {RAISED_FILES} before the run; for a container --ulimit nofile={RAISED_FILES}"
    if most < ENOUGH_FILES:
        return [Finding("open files", Level.ERROR if most < LEAST_FILES else Level.WARNING, text, way_out)]
    return [Finding("open files", Level.OK, f"at most {most} in a process")]


def probe_processes(facts: Facts) -> list[Finding]:
    """Threads and processes, by the user's limit and by that of a container."""
    found, limits = list[Finding](), facts.limits
    if limits.processes is not None and limits.processes < ENOUGH_TASKS:
        text = f"this user may have {limits.processes} processes and threads, and each of Ray's workers has dozens"
        found.append(
            Finding("processes", Level.WARNING, text, f"ulimit -u {ENOUGH_TASKS} before the run, or unlimited")
        )
    if limits.container_tasks is not None and limits.container_tasks < ENOUGH_TASKS:
        text = f"this container may start {limits.container_tasks} more, and each of Ray's workers has dozens"
        found.append(Finding("processes", Level.WARNING, text, "Start the container with --pids-limit -1"))
    return found or [Finding("processes", Level.OK, "enough threads and processes allowed")]


def probe_locked_memory(facts: Facts) -> list[Finding]:
    """On accelerators staged weights are pinned, once for each process that maps them."""
    size = facts.limits.locked_memory
    if facts.software.cpu:
        return []
    if size is None:
        return [Finding("locked memory", Level.OK, "no limit")]
    text = f"{gib(size)} may be locked: staged weights beyond that are not pinned, and load more slowly"
    return [Finding("locked memory", Level.WARNING, text, "ulimit -l unlimited; for a container --ulimit memlock=-1")]


def probe_shared_memory(facts: Facts) -> list[Finding]:
    """/dev/shm holds vLLM's queues, NCCL's buffers between devices of a host, and Ray's object store."""
    found = facts.shared_memory
    if found is None:
        return [Finding("shared memory", Level.ERROR, "there is no /dev/shm", "Mount it: mount -t tmpfs shm /dev/shm")]
    text = f"/dev/shm has {gib(found.free)} free of {gib(found.size)}"
    more = "Free some: rm what ended programs left there. For a container --shm-size or --ipc=host"
    if found.free < LEAST_SHARED:
        why = f"an engine's queue to its workers may take {gib(LEAST_SHARED)}, and ends with SIGBUS without it"
        return [Finding("shared memory", Level.ERROR, f"{text}: {why}", more)]
    wanted = min(int(STORE_SHARE * facts.machine.memory_available), SLOW_STORE)
    if found.free < wanted:
        why = f"Ray would keep its objects of up to {gib(wanted)} on a disk, which is slower"
        return [Finding("shared memory", Level.WARNING, f"{text}: {why}", more)]
    return [Finding("shared memory", Level.OK, text)]


def probe_temporary(facts: Facts) -> list[Finding]:
    """TMPDIR can be written, is short enough for sockets, and is on a disk of this machine."""
    found, asked = facts.temporary, facts.environ.get("TMPDIR")
    if found.folder is None:
        return [
            Finding(
                "TMPDIR", Level.ERROR, "no folder for temporary files can be written", "Set TMPDIR to a folder of yours"
            )
        ]
    folder = found.folder
    if asked and os.path.abspath(asked) != os.path.abspath(folder):
        text = f"TMPDIR={asked!r} cannot be used, so temporary files go to {folder}"
        return [Finding("TMPDIR", Level.WARNING, text, "Make that folder, or unset TMPDIR")]
    if found.write_error or found.socket_error:
        what = "be written" if found.write_error else "hold sockets"
        text = f"{folder} cannot {what}: {found.write_error or found.socket_error}"
        return [Finding("TMPDIR", Level.ERROR, text, "Set TMPDIR to a folder of yours on a disk of this machine")]
    problems = [*_length(folder), *_mount(facts)]
    return problems or [Finding("TMPDIR", Level.OK, folder)]


def _length(folder: str) -> list[Finding]:
    """runtime/scratch.py moves what has no room to /tmp."""
    length, ray, own = len(os.fsencode(folder)), max_parent_bytes(RAY_SOCKETS), max_parent_bytes(PROCESS_SOCKETS)
    if length <= ray:
        return []
    moved = "Ray's session is" if length <= own else "all temporary files of a run are"
    text = f"{folder} has {length} bytes, too many for the paths of sockets: {moved} in {FALLBACK} instead"
    return [Finding("TMPDIR", Level.WARNING, text, f"Set TMPDIR to a folder of at most {ray} bytes")]


def _mount(facts: Facts) -> list[Finding]:
    found = facts.temporary
    problems = []
    if found.kind in REMOTE or found.kind.startswith("fuse."):
        text = f"{found.folder} is on {found.kind}: locks, logs and agents' folders would go over the network"
        problems.append(Finding("TMPDIR", Level.WARNING, text, "Set TMPDIR to a folder on a disk of this machine"))
    if "noexec" in found.options:
        text = f"{found.folder} is mounted noexec: what agents and compilers write there cannot be run"
        problems.append(
            Finding("TMPDIR", Level.WARNING, text, "Set TMPDIR to a folder of another mount, or mount it with exec")
        )
    return problems


def probe_disks(facts: Facts) -> list[Finding]:
    """Room for temporary files and for what a run leaves; one finding for each file system."""
    by_device: dict[int, list[FileSystemFacts]] = {}
    for one in facts.file_systems:
        by_device.setdefault(one.device, []).append(one)
    return [_disk(same) for same in by_device.values()]


def _disk(same: list[FileSystemFacts]) -> Finding:
    one = same[0]
    text = f"{gib(one.free)} free for {' and '.join(f'{each.use} in {each.folder}' for each in same)}"
    way_out = "Free some, or choose another disk: TMPDIR, trainer.default_local_dir and hydra.run.dir name the folders"
    if one.free < LEAST_FREE:
        return Finding("disk", Level.ERROR, text, way_out)
    if one.free_files is not None and one.free_files < LEAST_FREE_FILES:
        return Finding("disk", Level.WARNING, f"{text}, but only {one.free_files} more files", way_out)
    if one.free < ENOUGH_FREE:
        return Finding(
            "disk", Level.WARNING, f"{text}: a checkpoint has the optimizer's state beside the weights", way_out
        )
    if one.free < (1 - RAY_FULL) * one.size:
        return Finding(
            "disk", Level.WARNING, f"{text}: beyond {RAY_FULL:.0%} full, Ray does not spill objects to it", way_out
        )
    return Finding("disk", Level.OK, text)


def gib(size: int) -> str:
    """Bytes in GiB; in MiB where that is less than one."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size >> 20} MiB"
