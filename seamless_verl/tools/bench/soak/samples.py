"""What a run holds at a moment: memory, descriptors and threads of its processes by role, and bytes on disk."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

JOURNAL = re.compile(r"^trajectories(-\d+)?\.sqlite(-wal)?$")
SCRATCH = "temporary files"  # Ray's session among them, with its logs


@dataclass(frozen=True)
class Sample:
    """One look at a run: `at` in seconds since its start, the steps it had logged, and each series' value.

    A series is (what, of whom): ("memory", "ray::DataPlane") in bytes, ("descriptors", ...), ("threads", ...),
    ("processes", ...), ("shared memory", "all"), ("disk", "journal").
    """

    at: float
    steps: int
    values: Mapping[tuple[str, str], float]


def look(run: psutil.Process, folders: Mapping[str, Path]) -> dict[tuple[str, str], float]:
    """All series of a run's process and its descendants, and of its folders by their names, now."""
    values: defaultdict[tuple[str, str], float] = defaultdict(float)
    for process in [run, *run.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError):
            held = held_by(process)  # as a whole, or not at all: one may end while it is looked at
            role = role_of(process.cmdline())
            for what, value in held.items():
                values[what, role] += value
    values["shared memory", "all"] = float(psutil.disk_usage("/dev/shm").used)
    for name, folder in folders.items():
        for of_whom, size in folder_bytes(name, folder):
            values["disk", of_whom] += size
    return dict(values)


def held_by(process: psutil.Process) -> dict[str, float]:
    """What one process holds. Its memory is what would be free if it ended: pages that no other process has."""
    return {
        "memory": float(process.memory_full_info().uss),
        "descriptors": float(process.num_fds()),
        "threads": float(process.num_threads()),
        "processes": 1.0,
    }


def role_of(command: list[str]) -> str:
    """A process's name in tables: an actor's class as Ray titles it, a script, or the program."""
    if not command:
        return "ended"
    title = command[0].split()[0]
    if title.startswith("ray::"):
        return "ray::" + re.split(r"[.(]", title.removeprefix("ray::"))[0]
    program = os.path.basename(title)
    if not program.startswith("python"):
        return program
    for before, argument in pairwise(command):
        if before == "-m":
            return argument
        if argument.endswith(".py"):
            return "/".join(Path(argument).parts[-2:])
    return "python"


def folder_bytes(name: str, folder: Path) -> Iterator[tuple[str, float]]:
    """(series, bytes) of a folder's files: those of a journal by themselves."""
    for place, _, names in os.walk(folder):
        for file in names:
            with suppress(FileNotFoundError):  # removed since the folder was listed
                size = float(Path(place, file).lstat().st_blocks * 512)
                yield ("journal" if JOURNAL.match(file) else name), size
