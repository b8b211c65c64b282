"""The file that a command writes: it appears whole, and takes the place of a file alone."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from seamless_verl.errors import ConfigError

WAY_OUT = "Give a place that can be written, or free the disk"


def refuse_special(key: str, path: Path) -> None:
    """ConfigError where a device, a pipe or a link is at `path`: a file that is renamed to it would replace it."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:  # nothing is there; if it may not be looked at, it cannot be written
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ConfigError(key, str(path), "it is a device or a link, which would be replaced", "Give a file")


def write_file(key: str, path: Path, text: str) -> None:
    """Raises ConfigError if the place is no file's, or it cannot be written; nothing is left beside it then."""
    refuse_special(key, path)
    if os.path.isdir(path):
        raise ConfigError(key, str(path), "it is a folder", "Give a file")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(key, str(path), str(error.strerror or error), WAY_OUT) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
