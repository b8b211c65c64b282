"""Folders that are replaced when they are whole, and the mistake that `--out` names what cannot be written."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seamless_verl.errors import ConfigError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replaced_folder(path: Path, *, marker: str) -> Iterator[Path]:
    """Yields a temporary folder that replaces `path` when the block ends without an error.

    An existing folder is replaced only when it is empty or has the file `marker`, which shows that it is of the
    same kind; ConfigError otherwise, before anything is written.
    """
    _refuse_foreign(path, marker)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Raises ConfigError for `--out` when the block cannot write there: a full disk, or a folder that is a file.

    Errors about other files are raised unchanged.
    """
    try:
        yield
    except OSError as error:
        if not _concerns(error, folder):
            raise
        raise ConfigError("--out", str(folder), str(error), "Name a folder that can be written") from error


def _concerns(error: OSError, folder: Path) -> bool:
    """Whether the error names a file in the folder or a parent of it; that of a full disk names none."""
    named = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    if not named:
        return error.errno in FULL
    for whole in (os.path.abspath, os.path.realpath):
        out, places = Path(whole(folder)), [Path(whole(name)) for name in named]
        if any(out.is_relative_to(place) or place.is_relative_to(out) for place in places):
            return True
    return False


def _refuse_foreign(path: Path, marker: str) -> None:
    if not path.exists() or (path / marker).is_file():
        return
    if not path.is_dir() or any(path.iterdir()):
        raise ConfigError("path", str(path), f"is in use and has no {marker}", "Name a new or empty folder")
