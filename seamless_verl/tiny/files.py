"""Writing that a reader never sees half done: everything goes to a temporary name beside its place first."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seamless_verl.errors import ConfigError


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write; it takes the place of `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replaced_folder(path: Path, *, marker: str) -> Iterator[Path]:
    """Yields a temporary folder that takes the place of `path` when the block ends without an error.

    A folder in the way is replaced only when it is empty or holds the file `marker`, the sign that it is
    of the kind being written; ConfigError otherwise, before anything is written.
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
    """Raises ConfigError for `--out` when the block cannot write: a full disk, or a folder that is a file."""
    try:
        yield
    except OSError as error:
        raise ConfigError("--out", str(folder), str(error), "Name a folder that can be written") from error


def _refuse_foreign(path: Path, marker: str) -> None:
    if not path.exists() or (path / marker).is_file():
        return
    if not path.is_dir() or any(path.iterdir()):
        raise ConfigError("path", str(path), f"is in use and has no {marker}", "Name a new or empty folder")
