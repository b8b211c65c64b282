"""What the file system lets a run do at a path; found by trying, as permissions allow root everything."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from seamless_verl.config.verl_keys import FOLDER, VERL_MODES
from seamless_verl.errors import ConfigError
from seamless_verl.runtime.locks import lock_file, missing_locks


@contextmanager
def looking_at(key: str, value: object, what: str = "") -> Iterator[None]:
    """In the block, an error of the file system is a ConfigError of this setting; `what` is the file that is read."""
    try:
        yield
    except OSError as error:
        reason = f"{what} cannot be read: {error.strerror or error}".lstrip()
        raise ConfigError(key, value, reason, f"Allow it to be read, or set {key} to another place") from error


def read_yaml(key: str, value: object, file: Path) -> Any:
    """What is in a YAML file that a setting names. ConfigError where it cannot be read."""
    with looking_at(key, value):
        text = file.read_bytes()
    try:
        return yaml.safe_load(text.decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = f"is not YAML: {' '.join(str(error).split())}"
        raise ConfigError(key, value, reason, "Correct the file") from error


def existing_folder(path: Path) -> Path:
    """The path itself, or its nearest parent that exists. OSError where that may not be looked at."""
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


IN_USE = "another run writes there now"
USE_ANOTHER = f"Wait for it or stop it, or set {FOLDER} to another folder"


def writes_checkpoints(mode: str, save_freq: object) -> bool:
    """Whether a run is a writer of its folder: our trainer always is, verl's modes are where they save."""
    return mode not in VERL_MODES or (isinstance(save_freq, int) and save_freq > 0)


def without_lock(folder: str, why: str) -> ConfigError:
    """The error of a checkpoint folder whose lock cannot be made beside it, as beside a volume that is mounted."""
    reason = f"its lock {lock_file(Path(folder))} cannot be made: {why}"
    return ConfigError(FOLDER, folder, reason, f"Set {FOLDER}={folder.rstrip('/')}/run, whose lock is in that folder")
