"""A run's one folder for everything temporary: sockets, locks, agents' folders, and Ray's session.

States of such a folder:
- HELD: its maker has the lock in it, and lives.
- LEFT: nobody has. The maker was killed; the next one beside it removes the folder.

The kernel gives a lock back however its owner ends, and needs no process ids to be compared, which a container,
or a host that started anew, gives to others.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PREFIX, RANDOM = "sf-", 8  # the folder's name: short, since it begins the paths of sockets
LOCK = "seamless.lock"
SOCKET = 107  # bytes that a socket's path may have
DEEPEST = "ray/session_2030-12-31_23-59-59_123456_4194304/sockets/plasma_store"
LONGEST = SOCKET - len(f"/{PREFIX}{'x' * RANDOM}/{DEEPEST}")  # bytes of the path of the folder's parent


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder but for its lock, under this process's own temporary one; it is removed with all in it."""
    parent = scratch_parent()
    remove_left(parent)
    path, lock = made(parent)
    try:
        yield path
    finally:
        remove(path)
        lock.close()


def scratch_parent() -> Path:
    """Where python puts temporary files, TMPDIR first of all; /tmp when a socket's path would be too long there."""
    own = tempfile.gettempdir()
    if len(os.fsencode(own)) <= LONGEST:
        return Path(own)
    system = Path("/tmp")
    sys.stderr.write(
        f"TMPDIR={own!r}: too long for the paths of sockets. Name one of at most {LONGEST} bytes; "
        f"this run's temporary files are in {system}\n"
    )
    return system


def made(parent: Path) -> tuple[Path, IO[bytes]]:
    """A new folder, and its lock, held."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = (path / LOCK).open("wb")
        with suppress(OSError):  # a file system without locks, where nobody removes what is not held
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / LOCK).exists():
            return path, lock
        lock.close()  # another run took it for one that was left, just before


def remove_left(parent: Path) -> None:
    """Remove this user's folders that nobody holds."""
    for file in parent.glob(f"{PREFIX}{'?' * RANDOM}/{LOCK}"):
        try:
            lock = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # gone, or another user's
            continue
        try:
            if file.parent.lstat().st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(file.parent)
        except OSError:  # it is held, or cannot be
            pass
        finally:
            os.close(lock)


def remove(path: Path) -> None:
    """Delete it all, also what is read-only; says so where that cannot be."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        open_folders(path)
        shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        sys.stderr.write(f"{path} is not all deleted\n")


def open_folders(root: Path) -> None:
    with suppress(OSError):  # what stays shut is not deleted, and that is said
        for folder, names, _ in os.walk(root):  # top down, so that each is open before it is entered
            for path in (Path(folder, name) for name in names):
                if stat.S_ISDIR(path.lstat().st_mode):
                    path.chmod(0o700)
