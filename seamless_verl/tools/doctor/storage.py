"""Probes of what a run writes to: shared memory, the folder of temporary files, and disks."""

from __future__ import annotations

import os

from seamless_verl.runtime.scratch import FALLBACK, PROCESS_SOCKETS, RAY_SOCKETS, max_parent_bytes
from seamless_verl.tools.doctor.facts import Facts, FileSystemFacts
from seamless_verl.tools.doctor.finding import GIB, Finding, error, gib, ok, warning

LEAST_SHARED = 256 << 20  # vLLM's queue between an engine and its workers: 10 chunks of 16 MiB
STORE_SHARE = 0.3  # of the memory that Ray takes for its object store (ray_constants.py, 2.60)
SLOW_STORE = 10 * 10**9  # above it Ray fits the store to /dev/shm; up to it, it takes the disk
LEAST_FREE, ENOUGH_FREE = GIB, 10 * GIB
RAY_FULL = 0.95  # of a disk, from which on Ray does not spill objects (local_fs_capacity_threshold)
LEAST_FREE_FILES = 10_000
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs")


def probe_shared_memory(facts: Facts) -> list[Finding]:
    """/dev/shm holds vLLM's queues, NCCL's buffers between devices of a host, and Ray's object store."""
    found = facts.shared_memory
    if found is None:
        return [error("shared memory", "there is no /dev/shm", "Mount it: mount -t tmpfs shm /dev/shm")]
    text = f"/dev/shm has {gib(found.free)} free of {gib(found.size)}"
    more = "Free some: rm what ended programs left there. For a container --shm-size or --ipc=host"
    if found.free < LEAST_SHARED:
        why = f"an engine's queue to its workers may take {gib(LEAST_SHARED)}, and ends with SIGBUS without it"
        return [error("shared memory", f"{text}: {why}", more)]
    wanted = min(int(STORE_SHARE * facts.machine.memory_available), SLOW_STORE)
    if found.free < wanted:
        why = f"Ray would keep its objects of up to {gib(wanted)} on a disk, which is slower"
        return [warning("shared memory", f"{text}: {why}", more)]
    return [ok("shared memory", text)]


def probe_temporary(facts: Facts) -> list[Finding]:
    """TMPDIR can be written, is short enough for sockets, and is on a disk of this machine."""
    found, asked = facts.temporary, facts.environ.get("TMPDIR")
    if found.folder is None:
        return [error("TMPDIR", "no folder for temporary files can be written", "Set TMPDIR to a folder of yours")]
    folder = found.folder
    if asked and os.path.abspath(asked) != os.path.abspath(folder):
        text = f"TMPDIR={asked!r} cannot be used, so temporary files go to {folder}"
        return [warning("TMPDIR", text, "Make that folder, or unset TMPDIR")]
    if found.write_error or found.socket_error:
        what = "be written" if found.write_error else "hold sockets"
        text = f"{folder} cannot {what}: {found.write_error or found.socket_error}"
        return [error("TMPDIR", text, "Set TMPDIR to a folder of yours on a disk of this machine")]
    problems = [*_length(folder), *_mount(facts)]
    return problems or [ok("TMPDIR", folder)]


def _length(folder: str) -> list[Finding]:
    """runtime/scratch.py moves what has no room to /tmp."""
    length, ray, own = len(os.fsencode(folder)), max_parent_bytes(RAY_SOCKETS), max_parent_bytes(PROCESS_SOCKETS)
    if length <= ray:
        return []
    moved = "Ray's session is" if length <= own else "all temporary files of a run are"
    text = f"{folder} has {length} bytes, too many for the paths of sockets: {moved} in {FALLBACK} instead"
    return [warning("TMPDIR", text, f"Set TMPDIR to a folder of at most {ray} bytes")]


def _mount(facts: Facts) -> list[Finding]:
    found = facts.temporary
    problems = []
    if found.kind in REMOTE or found.kind.startswith("fuse."):
        text = f"{found.folder} is on {found.kind}: locks, logs and agents' folders would go over the network"
        problems.append(warning("TMPDIR", text, "Set TMPDIR to a folder on a disk of this machine"))
    if "noexec" in found.options:
        text = f"{found.folder} is mounted noexec: what agents and compilers write there cannot be run"
        problems.append(warning("TMPDIR", text, "Set TMPDIR to a folder of another mount, or mount it with exec"))
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
        return error("disk", text, way_out)
    if one.free_files is not None and one.free_files < LEAST_FREE_FILES:
        return warning("disk", f"{text}, but only {one.free_files} more files", way_out)
    if one.free < ENOUGH_FREE:
        return warning("disk", f"{text}: a checkpoint has the optimizer's state beside the weights", way_out)
    if one.free < (1 - RAY_FULL) * one.size:
        return warning("disk", f"{text}: beyond {RAY_FULL:.0%} full, Ray does not spill objects to it", way_out)
    return ok("disk", text)
