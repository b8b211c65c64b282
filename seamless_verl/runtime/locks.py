"""The lock of a file or folder that one process writes and others may read. It is released when its process ends."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ACQUIRE_LIMIT_S = 0.2  # `is_locked` holds the lock for microseconds; a writer waits at most so long for it


def lock_file(path: Path) -> Path:
    """The file whose lock the one writer of `path` holds: beside it, by whatever name or link it is reached.

    In a folder that is there and beside which nothing can be made, as a volume that is mounted, it is inside.
    """
    real = os.path.realpath(path)
    beside, parent = f"{real}-lock", os.path.dirname(real)
    inside = os.path.isdir(real) and not os.path.exists(beside) and not os.access(parent, os.W_OK)
    return Path(real, ".lock") if inside else Path(beside)


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """In the block, this process is the only writer of `path`, which need not exist.

    Raises:
        BlockingIOError: another process is the writer.
        OSError: its folder, or the lock in it, cannot be made.
    """
    file = lock_file(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        _acquire(lock)
        yield
    finally:
        os.close(lock)


def is_locked(path: Path) -> bool:
    """Whether a process writes to `path` now. It does not disturb the writer, nor other callers of this function.

    Raises:
        OSError: it cannot be determined: the lock may not be read, or the file system has none.
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


def missing_locks(folder: Path) -> str:
    """Why files of this folder cannot be locked, as on some network file systems; empty if they can.

    Raises:
        OSError: nothing can be made there.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return str(error.strerror)
    return ""


def _acquire(lock: int) -> None:
    deadline = time.monotonic() + ACQUIRE_LIMIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(ACQUIRE_LIMIT_S / 20)  # nobody is notified when a lock is released
