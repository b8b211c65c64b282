"""Scratch folder: a run's one folder for everything temporary: sockets, locks, agents' folders, and Ray's session.

States of a scratch folder:
- HELD: the process that made it lives, and holds the lock in it.
- ABANDONED: nobody holds the lock, since its maker was killed. The next run that makes one beside it, on the same
  host, removes it.

The kernel releases a lock however its owner ends. No process ids are compared, which a container, or a host that
booted anew, gives to other processes. Where hosts share a TMPDIR, one may not see the locks of another: each judges
only the folders whose lock has its own name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from seamless_verl.runtime.console import say

PREFIX, RANDOM_CHARS = "sf-", 8  # the folder's name: short, since it begins the paths of sockets
LOCK = f"{os.uname().nodename}.lock"
FALLBACK = Path("/tmp")  # where TMPDIR is too long
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SOCKET_PATH_BYTES = 107  # that a socket's path may have
# Bytes of the longest path of a socket below the folder: of vLLM's, python's and torch's, and of Ray's session.
PROCESS_SOCKETS = len("/01234567-89ab-cdef-0123-456789abcdef")
RAY_SOCKETS = len("/ray/session_2030-12-31_23-59-59_123456_4194304/sockets/plasma_store")


@contextmanager
def scratch_folder(socket_bytes: int = PROCESS_SOCKETS) -> Iterator[Path]:
    """An empty folder but for its lock, with room for sockets whose paths below it have up to `socket_bytes`.

    It is made where python puts temporary files, TMPDIR first of all; where that path is too long, in /tmp, with a
    message on standard error. It is removed with all in it.
    """
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > max_parent_bytes(socket_bytes):
        parent = FALLBACK
        content = "Ray's session is" if socket_bytes == RAY_SOCKETS else "This run's temporary files are"
        say(
            f"TMPDIR={tempfile.gettempdir()!r}: too long for the paths of sockets. {content} in {parent}. "
            f"Name a folder of at most {max_parent_bytes(socket_bytes)} bytes to have it there"
        )
    remove_abandoned(parent)
    path, lock = create_locked(parent)
    try:
        yield path
    finally:
        remove(path)
        lock.close()


@contextmanager
def session_folder(scratch: Path) -> Iterator[Path]:
    """Where Ray's session goes: the scratch folder itself, or another one in which Ray's sockets have room."""
    if len(os.fsencode(scratch)) + RAY_SOCKETS <= SOCKET_PATH_BYTES:
        yield scratch
    else:
        with scratch_folder(RAY_SOCKETS) as short:
            yield short


def max_parent_bytes(socket_bytes: int) -> int:
    """Bytes that the path of the folder's parent may have."""
    return SOCKET_PATH_BYTES - len(f"/{PREFIX}{'x' * RANDOM_CHARS}") - socket_bytes


def create_locked(parent: Path) -> tuple[Path, IO[bytes]]:
    """A new folder, and its lock, held."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = (path / LOCK).open("wb")
        with suppress(OSError):  # a file system without locks, where nobody removes what is not held
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / LOCK).exists():
            return path, lock
        lock.close()  # another run took it for an abandoned one, and removed it just before


def remove_abandoned(parent: Path) -> None:
    """Remove this user's scratch folders that no process on this host holds."""
    for file in (folder / LOCK for folder in parent.glob(f"{PREFIX}{'?' * RANDOM_CHARS}")):
        try:
            lock = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # it is gone, or another user's
            continue
        try:
            if file.parent.lstat().st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(file.parent)
        except OSError:  # it is held, or cannot be locked
            pass
        finally:
            os.close(lock)


@contextmanager
def signals_ignored() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def remove(path: Path) -> None:
    """Delete the folder, read-only content included. What cannot be deleted is reported, and left to the next run.

    The lock goes last: a folder without one would belong to nobody, and stay.
    """
    with signals_ignored():
        if not delete_contents(path):
            make_folders_writable(path)
        if delete_contents(path):
            shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            say(f"{path} is not all deleted")


def delete_contents(path: Path) -> bool:
    """Delete everything in the folder but its lock; returns whether nothing else is left."""
    with suppress(OSError):  # it is gone, or not accessible
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != LOCK:
                entry.unlink()
        return {*os.listdir(path)} <= {LOCK}
    return not path.exists()


def make_folders_writable(root: Path) -> None:
    with suppress(OSError):  # what stays inaccessible is not deleted, and that is reported
        for folder, names, _ in os.walk(root):  # top down, so that each is accessible before it is entered
            for path in (Path(folder, name) for name in names):
                if stat.S_ISDIR(path.lstat().st_mode):
                    path.chmod(0o700)
