"""What lies in shared memory and belongs to no living process."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")


def pieces() -> set[str]:
    return set(os.listdir(FOLDER))


def abandoned(names: set[str]) -> set[str]:
    """Those that no process has mapped: what other programs have begun meanwhile is theirs.

    By inode, since a semaphore is mapped before it gets its name and /proc shows the one it had then.
    """
    mapped = _mapped()
    inodes = {}
    for name in names:
        with suppress(FileNotFoundError):  # it has just gone
            inodes[name] = (FOLDER / name).stat().st_ino
    return {name for name, inode in inodes.items() if inode not in mapped}


def check_nothing_left(since: set[str], timeout_s: float = 20) -> None:
    """Raise AssertionError unless all that came after `since` is gone or in use soon: other programs come and go."""
    deadline = time.monotonic() + timeout_s
    while left := abandoned(pieces() - since):
        assert time.monotonic() < deadline, f"nobody has these pieces of shared memory: {sorted(left)}"
        time.sleep(0.2)


def _mapped() -> set[int]:
    """The inodes on the device of shared memory that some process has mapped."""
    device = f"{os.major(FOLDER.stat().st_dev):02x}:{os.minor(FOLDER.stat().st_dev):02x}"
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is not ours
            fields = [line.split(maxsplit=5) for line in (process / "maps").read_text().splitlines()]
            found |= {int(inode) for _, _, _, where, inode, *_ in fields if where == device}
    return found
