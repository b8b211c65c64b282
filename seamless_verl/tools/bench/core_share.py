"""A share of a core for a process of a bench: a CPU cgroup of its own, whose quota is that share.

Two processes that have a quarter of a core each have twice as much as one, also where there is no second core for them.
A process is limited from when it is put into its group: its threads, its children, and all that they start later.
"""

from __future__ import annotations

import errno
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from seamless_verl.errors import ConfigError

KEY = "--core-share"
MOUNTS = Path("/proc/self/mountinfo")
PERIOD_US = 20_000  # Linux has 100 ms by default, for most of which a process of a small share would stand still
LEAST_QUOTA_US, LEAST_SHARE = 1000, 0.001  # Linux has no smaller quota, and no period above a second
REMOVE_S = 1.0
MOUNT_THEM = "Run as root where cgroups are mounted writable, or leave it out"
ENABLE_THEM = "Write +cpu to that file as root, or leave it out"


def check_share(share: float) -> None:
    """ConfigError where the share is no part of a core, or one that is too small for a quota."""
    if not LEAST_SHARE <= share <= 1:
        reason = "it is the part of a core that each shard may use"
        raise ConfigError(KEY, share, reason, f"Give {LEAST_SHARE:g} to 1")


def quota_settings(share: float, version: int) -> dict[str, str]:
    """What limits a group to `share` of a core, by the version of cgroups: its files and texts, in order."""
    period = max(PERIOD_US, round(LEAST_QUOTA_US / share))
    quota = round(share * period)
    if version == 1:
        return {"cpu.cfs_period_us": str(period), "cpu.cfs_quota_us": str(quota)}
    return {"cpu.max": f"{quota} {period}"}


def find_mount(mountinfo: str) -> tuple[int, Path] | None:
    """The version and the folder of CPU cgroups, from the text of /proc/self/mountinfo; None where there are none.

    A system with both versions has the CPU controller in one of them alone: in version 1, if it is mounted there.
    """
    unified = None
    for line in mountinfo.splitlines():
        mount, _, file_system = line.partition(" - ")
        folder, (kind, *_, options) = Path(mount.split()[4]), file_system.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return 1, folder
        if kind == "cgroup2":
            unified = unified or (2, folder)
    return unified


@contextmanager
def limited_to(share: float | None) -> Iterator[Callable[[int], None]]:
    """A function that limits the process of a pid to `share` of a core, while the block lasts; with None to nothing.

    Several processes share one block's part. They have to end before the block does.

    Raises:
        ConfigError: the share is none of a core, or no CPU cgroup can be made or used here.
        OSError: the group cannot be removed, since a process in it has not ended.
    """
    if share is None:
        yield lambda pid: None
        return
    check_share(share)
    mount = find_mount(MOUNTS.read_text())
    if mount is None:
        raise ConfigError(KEY, share, "no CPU cgroups are mounted here", MOUNT_THEM)
    version, folder = mount
    enabled = folder / "cgroup.subtree_control"
    if version == 2 and "cpu" not in enabled.read_text().split():
        raise ConfigError(KEY, share, f"cgroups have no CPU controller here ({enabled})", ENABLE_THEM)
    with _refused(share, folder):
        group = Path(tempfile.mkdtemp(prefix="scale-bench-", dir=folder))

    def write(file: str, text: str) -> None:
        with _refused(share, group / file):
            (group / file).write_text(text)

    def limit(pid: int) -> None:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):  # it has ended
            write("cgroup.procs", str(pid))
            for child in psutil.Process(pid).children(recursive=True):  # later ones are in its group from the first
                with suppress(ProcessLookupError):
                    write("cgroup.procs", str(child.pid))

    try:
        for file, text in quota_settings(share, version).items():
            write(file, text)
        yield limit
    finally:
        _remove(group)


@contextmanager
def _refused(share: float, place: Path) -> Iterator[None]:
    """ConfigError where the system refuses what is done at a place."""
    try:
        yield
    except ProcessLookupError:
        raise
    except OSError as error:
        reason = f"no CPU cgroup can be made or used: {error.strerror} ({place})"
        raise ConfigError(KEY, share, reason, MOUNT_THEM) from error


def _remove(group: Path) -> None:
    """A process that has just ended may be in its group for a moment longer."""
    deadline = time.monotonic() + REMOVE_S
    while True:
        try:
            return group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)  # nothing notifies of a group without processes
