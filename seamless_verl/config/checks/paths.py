"""What the file system lets a run do at a path; found by trying, as permissions allow root everything."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from seamless_verl.runtime.locks import lock_file, missing_locks


def existing_folder(path: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def write_error(folder: Path) -> str | None:
    """Why nothing can be written in a folder that exists; None when it can."""
    try:
        with TemporaryDirectory(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def lock_error(path: Path) -> str | None:
    """Why a writer of `path` cannot have its lock; None when it can, also where another has it now."""
    file = lock_file(path)
    try:
        lock = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        place = existing_folder(file.parent)
        return write_error(place) or missing_locks(place) or None
    except OSError as error:
        return error.strerror or str(error)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(lock)
    return None
