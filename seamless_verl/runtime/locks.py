"""The lock beside a file or folder that one process writes and others may read. It ends with its process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOKING_S = 0.2  # whoever only looks for a writer holds the lock for microseconds


def lock_file(path: Path) -> Path:
    """The file whose lock the one writer of `path` holds."""
    return path.with_name(path.name + "-lock")


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Inside, this process is the writer of `path`, which need not be there.

    Raises:
        BlockingIOError: another process is.
        OSError: its folder, or the lock in it, cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(lock_file(path), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        _take(lock)
        yield
    finally:
        os.close(lock)


def is_locked(path: Path) -> bool:
    """Whether a process writes to `path` now. Takes nothing from it, and minds no other who only looks.

    Raises:
        OSError: it cannot be told: the lock may not be read, or the file system has none.
    """
    try:
        lock = os.open(lock_file(path), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _take(lock: int) -> None:
    limit = time.monotonic() + LOOKING_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > limit:
                raise
        time.sleep(LOOKING_S / 20)  # a lock tells nobody that it is free
