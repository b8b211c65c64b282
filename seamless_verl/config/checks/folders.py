"""Folders that a run is going to write to."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory


def nearest_there(path: Path) -> Path:
    """The folder itself, or the first above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def why_not_in(folder: Path) -> str | None:
    """Why nothing can be made in a folder that is there. Asked by making something: to root, who is refused too,
    permissions say yes."""
    try:
        with TemporaryDirectory(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
