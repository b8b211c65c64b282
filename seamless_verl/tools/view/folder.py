"""Finds the files of a run in its folder: journals, traces of its devices, and what it says of itself."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from seamless_verl.errors import ConfigError
from seamless_verl.runtime.files import DESCRIPTION, RunDescription
from seamless_verl.runtime.locks import is_locked
from seamless_verl.runtime.step_metrics import FILE as METRICS

JOURNALS, TRACES = "trajectories*.sqlite", "devices*.trace.json"
DEPTH = 4  # folders below the given one in which runs are looked for
MAX_LISTED = 5  # runs named in an error message
WAY_OUT = "Give a run's trainer.default_local_dir, where its checkpoints are"


@dataclass(frozen=True)
class RunFiles:
    """The files that exist now; `trace` is that of the last start, None before the first step."""

    folder: Path
    description: RunDescription | None
    journals: tuple[Path, ...]
    trace: Path | None

    @classmethod
    def of(cls, folder: Path) -> RunFiles:
        """The run's own list of journals counts, and of each the one in this folder, which may be a copy of the run."""
        description = RunDescription.read(folder)
        named = [Path(path) for path in description.journals] if description else []
        named = [here if (here := folder / path.name).exists() else path for path in named]
        journals = [path for path in named if path.exists()] or sorted(folder.glob(JOURNALS))
        begun = tuple(path for path in journals if path.stat().st_size)  # an empty one is about to be made
        return cls(folder, description, begun, max(folder.glob(TRACES), key=start_number, default=None))

    @property
    def running(self) -> bool | None:
        """Whether a process of the run writes now; None if that cannot be determined."""
        try:
            return any(is_locked(path) for path in (self.folder, *self.journals))
        except OSError:
            return None


def start_number(trace: Path) -> int:
    """1 for devices.trace.json, 2 for devices-2.trace.json of the run resumed once, and so on."""
    found = re.search(r"-(\d+)\.trace\.json$", trace.name)
    return int(found[1]) if found else 1


def find_run(path: Path) -> Path:
    """The folder of the run at `path`, or of the only one below it.

    Raises:
        ConfigError: there is no such folder, no run in it, or more than one.
    """
    if not path.is_dir():
        reason = "it is a file" if path.exists() else "there is no such folder"
        raise ConfigError("FOLDER", str(path), reason, WAY_OUT)
    if is_run(path):
        return path
    found = runs_below(path)
    if not found:
        reason = f"it has no run: neither {DESCRIPTION}, {METRICS}, a journal nor a trace of devices is in it"
        raise ConfigError("FOLDER", str(path), reason, WAY_OUT)
    if len(found) > 1:
        more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
        listed = ", ".join(map(str, found[:MAX_LISTED]))
        raise ConfigError("FOLDER", str(path), f"it has {len(found)} runs", f"Give one of them: {listed}{more}")
    return found[0]


def is_run(folder: Path) -> bool:
    """Whether the folder has anything that a run writes; not if it may not be read, or is gone."""
    names = (DESCRIPTION, METRICS, JOURNALS, TRACES)
    with suppress(OSError):
        return any(any(folder.glob(name)) for name in names)
    return False


def runs_below(path: Path) -> list[Path]:
    """The runs in folders below this one, not deeper than `DEPTH`, in alphabetical order."""
    level, found = [path], list[Path]()
    for _ in range(DEPTH):
        level = [child for folder in level for child in folders_in(folder)]
        found += [folder for folder in level if is_run(folder)]
    return sorted(found)


def folders_in(path: Path) -> list[Path]:
    """The folders in this one, without links; none of one that may not be read, or is gone."""
    found = list[Path]()
    with suppress(OSError):
        for child in path.iterdir():
            with suppress(OSError):
                if child.is_dir() and not child.is_symlink():
                    found.append(child)
    return found
