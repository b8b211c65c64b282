"""A run's one folder for everything temporary: sockets, locks, agents' folders, and Ray's session.

States of such a folder:
- HELD: its maker has the lock in it, and lives.
- LEFT: nobody has. The maker was killed; the next one beside it, on the same host, removes the folder.

The kernel gives a lock back however its owner ends, and needs no process ids to be compared, which a container,
or a host that started anew, gives to others. Where hosts share a TMPDIR, one may not see the locks of another:
each judges only those that have its own name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PREFIX, RANDOM = "sf-", 8  # the folder's name: short, since it begins the paths of sockets
LOCK = f"{os.uname().nodename}.lock"
SYSTEM = Path("/tmp")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SOCKET = 107  # bytes that a socket's path may have
# Bytes of the longest path of a socket below the folder: of vLLM's, python's and torch's, and of Ray's session.
PROCESSES = len("/01234567-89ab-cdef-0123-456789abcdef")
SESSION = len("/ray/session_2030-12-31_23-59-59_123456_4194304/sockets/plasma_store")


@contextmanager
def scratch_folder(below: int = PROCESSES) -> Iterator[Path]:
    """An empty folder but for its lock, with room for sockets whose paths go on for `below` bytes; it is removed with
    all in it. Where python puts temporary files, TMPDIR first of all; in /tmp, and that is said, where it is too long.
    """
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > longest(below):
        parent = SYSTEM
        what = "Ray's session is" if below == SESSION else "This run's temporary files are"
        sys.stderr.write(
            f"TMPDIR={tempfile.gettempdir()!r}: too long for the paths of sockets. {what} in {parent}. "
            f"Name a folder of at most {longest(below)} bytes to have it there\n"
        )
    remove_left(parent)
    path, lock = made(parent)
    try:
        yield path
    finally:
        remove(path)
        lock.close()


@contextmanager
def session_folder(scratch: Path) -> Iterator[Path]:
    """Where Ray's session goes: the scratch folder itself, or one beside which Ray's sockets have room."""
    if len(os.fsencode(scratch)) + SESSION <= SOCKET:
        yield scratch
    else:
        with scratch_folder(SESSION) as short:
            yield short


def longest(below: int) -> int:
    """Bytes that the path of the folder's parent may have."""
    return SOCKET - len(f"/{PREFIX}{'x' * RANDOM}") - below


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
    """Remove this user's folders that nobody on this host holds."""
    for file in (folder / LOCK for folder in parent.glob(f"{PREFIX}{'?' * RANDOM}")):
        try:
            lock = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # gone, or another's
            continue
        try:
            if file.parent.lstat().st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(file.parent)
        except OSError:  # it is held, or cannot be
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
    """Delete it all, also what is read-only; says so where that cannot be, and leaves it to the next run.

    The lock goes last: a folder without one would be nobody's, and stay.
    """
    with signals_ignored():
        if not emptied(path):
            open_folders(path)
        if emptied(path):
            shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            sys.stderr.write(f"{path} is not all deleted\n")


def emptied(path: Path) -> bool:
    """Delete what is in it but its lock; whether nothing else is left."""
    with suppress(OSError):  # it is gone, or shut
        for one in path.iterdir():
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one, ignore_errors=True)
            elif one.name != LOCK:
                one.unlink()
        return {*os.listdir(path)} <= {LOCK}
    return not path.exists()


def open_folders(root: Path) -> None:
    with suppress(OSError):  # what stays shut is not deleted, and that is said
        for folder, names, _ in os.walk(root):  # top down, so that each is open before it is entered
            for path in (Path(folder, name) for name in names):
                if stat.S_ISDIR(path.lstat().st_mode):
                    path.chmod(0o700)
