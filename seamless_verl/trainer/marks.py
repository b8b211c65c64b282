"""What a checkpoint folder held before a save, written down in that folder as `.saving-<run>.json`.

verl writes `global_step_<n>/` and then, last, the number n into a tracker file, which it empties
first. So a tracker that changed since the mark says which of the folders since then are whole.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Mark:
    """A checkpoint folder before the save of `step`, or before a whole run when `step` is None.

    `tracker` is the tracker file's text and its time of modification in ns, None when there is none.
    """

    run: str
    step: int | None
    steps: list[int]
    tracker: list[str | int] | None
    host: str
    pid: int

    @classmethod
    def of(cls, folder: Path, run: str, step: int | None) -> Mark:
        steps, host = sorted(saved_steps(folder)), socket.gethostname()
        return cls(run, step, steps, tracker_state(folder), host, os.getpid())

    @classmethod
    def read(cls, path: Path) -> Mark:
        return cls(**json.loads(path.read_text()))

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        replace(mark_file(folder, self.run), json.dumps(asdict(self)))

    @property
    def alive(self) -> bool:
        """Whether its process may still be there: one on another host always may."""
        return self.host != socket.gethostname() or psutil.pid_exists(self.pid)

    def begun(self, folder: Path) -> set[int]:
        """The steps whose save began since."""
        saved = saved_steps(folder)
        return saved - set(self.steps) if self.step is None else saved & {self.step}

    def finished(self, folder: Path) -> set[int]:
        """Those of them that are whole; a run's steps ascend."""
        state, begun = tracker_state(folder), self.begun(folder)
        if state is None or state == self.tracker:
            return set()
        number = str(state[0])
        if not number:
            return begun
        return {s for s in begun if str(s) == number or (self.step is None and s < int(number))}


def marks(folder: Path) -> Iterator[Mark]:
    """All marks in a folder, whoever's."""
    for path in folder.glob(".saving-*.json"):
        with suppress(FileNotFoundError):  # its run has just finished saving
            yield Mark.read(path)


def mark_file(folder: Path, run: str) -> Path:
    return folder / f".saving-{run}.json"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"global_step_{step}"


def saved_steps(folder: Path) -> set[int]:
    numbers = (path.name.removeprefix("global_step_") for path in folder.glob("global_step_*"))
    return {int(number) for number in numbers if number.isdigit()}


def tracker_state(folder: Path) -> list[str | int] | None:
    tracker = folder / TRACKER
    return [tracker.read_text().strip(), tracker.stat().st_mtime_ns] if tracker.exists() else None


def replace(path: Path, text: str) -> None:
    """Write a file so that it is never seen half-written."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(text)
    partial.replace(path)
