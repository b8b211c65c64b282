"""What a checkpoint folder held before a save, written down in that folder as `.saving-<run>.json`.

verl writes `global_step_<n>/` and then, last, the number n into a tracker file, which it empties
first. So a tracker that changed since the mark says which of the folders since then are whole.

States of a mark, which is there from before a save (or a run) until that is known to be whole or undone:
- ALIVE: the process that made it, or its supervisor, still runs: what it marks is nobody else's. On
  another host, which cannot be asked, that is one whose file was refreshed within SILENCE_S.
- DEAD: of this host, and both processes are gone, which takes a supervisor that was killed, or a host
  that went down. It protects nothing, and the next run of this host settles it.
- SILENT: of another host, and not refreshed for SILENCE_S. It protects nothing, and is left to its host.

ALIVE -> gone, by a save that ended or by its own supervisor; ALIVE -> DEAD or SILENT; DEAD -> gone;
SILENT -> ALIVE, when only the file system was away.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

TRACKER = "latest_checkpointed_iteration.txt"
REFRESH_S = 60.0  # between two signs of life of a mark
SILENCE_S = 15 * REFRESH_S  # without one, after which another host's mark protects nothing
ENDED = -1.0  # the start of a process that has ended and that nobody has asked for yet
BOOT, NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Life:
    """A process told from a later one with the same id by `started`: ticks since boot, or seconds since 1970.

    `system` is the boot and the namespace in which `pid` counts, None where there are no such things.
    """

    pid: int
    started: float | None
    system: str | None

    @classmethod
    def of(cls, pid: int) -> Life:
        return cls(pid, started(pid), system())

    @property
    def goes_on(self) -> bool:
        """For one of this system; where a start cannot be seen, whatever has its id is taken for it."""
        now = started(self.pid)
        return psutil.pid_exists(self.pid) if None in (now, self.started) else now == self.started


def started(pid: int) -> float | None:
    """When a process began, by a clock that nobody sets where there is one; None when there is none to be seen."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return ENDED if state in "ZX" else float(fields[18])  # proc(5), fields 3 and 22
    except FileNotFoundError:
        with suppress(psutil.Error):  # also where there is no /proc
            return float(psutil.Process(pid).create_time())
    except ProcessLookupError:  # it ended while it was read
        pass
    return None


def system() -> str | None:
    return f"{BOOT.read_text().strip()} {os.readlink(NAMESPACE)}" if BOOT.exists() and NAMESPACE.exists() else None


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
    lives: tuple[Life, ...] = ()  # of the process that saves and of its supervisor; none in an older release's
    async_save: bool = True  # when not known, its folders are left

    @classmethod
    def of(cls, folder: Path, run: str, step: int | None, *, supervisor: Life | None, async_save: bool) -> Mark:
        steps, host, me = sorted(saved_steps(folder)), socket.gethostname(), Life.of(os.getpid())
        lives = (me,) if supervisor is None else (me, supervisor)
        return cls(run, step, steps, tracker_state(folder), host, me.pid, lives, async_save)

    @classmethod
    def read(cls, path: Path) -> Mark:
        values = json.loads(path.read_text())
        return cls(**values | {"lives": tuple(Life(**life) for life in values.get("lives", ()))})

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        replace(mark_file(folder, self.run), json.dumps(asdict(self)))

    @property
    def here(self) -> bool:
        """Whether its processes are where this one could see them."""
        return self.host == socket.gethostname() and all(life.system == system() for life in self.lives)

    def alive(self, folder: Path) -> bool:
        """Whether its run may still be saving."""
        if not self.here:
            return silence(folder, self.run) < SILENCE_S
        return any(life.goes_on for life in self.lives or (Life(self.pid, None, None),))

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


def silence(folder: Path, run: str) -> float:
    """Seconds since a sign of life, by the clock of the file system, which every host that shares it has."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as clock:
            return os.fstat(clock.fileno()).st_mtime - mark_file(folder, run).stat().st_mtime
    except FileNotFoundError:  # its run has just finished saving
        return float("inf")


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
