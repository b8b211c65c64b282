"""The lock beside a file that one process writes and others may read."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_file(path: Path) -> Path:
    """The file whose lock the one writer of `path` holds."""
    return path.with_name(path.name + "-lock")


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
