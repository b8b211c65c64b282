"""Locks of files and folders that one process writes, which end with it however it ends."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


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


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Inside, no other process that asks in this way writes into the folder, which is made where it is not there.

    Raises:
        BlockingIOError: another one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    itself = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(itself)
        yield
    finally:
        os.close(itself)


def lock(folder: int) -> None:
    """BlockingIOError where it is locked; a file system that has no locks for folders lets everybody have one."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        logger.warning("nothing keeps another run from saving there too: %s", error)
