"""Checkpoint marker: what a checkpoint folder held before a save, as the file `.saving-<run>.json` in that folder.

verl writes `global_step_<n>/` and then, last, the number n into a tracker file, which it empties first. So a tracker
that changed since the marker was written says which of the newer folders are complete.

A marker exists from before a save (or a whole run) until that save is known to be complete or was removed. Its states:
- ALIVE: the process that wrote it, or its supervisor, still runs. What it marks belongs to that run alone. A marker of
  another host, whose processes cannot be seen, is alive while its file was refreshed within EXPIRY_S.
- DEAD: of this host, and both processes are gone: the supervisor was killed, or the host went down. It protects
  nothing, and the next run of this host cleans up after it.
- EXPIRED: of another host, and not refreshed for EXPIRY_S. It protects nothing, and is left to its host.

ALIVE -> gone, by a save that ended or by its own supervisor; ALIVE -> DEAD or EXPIRED; DEAD -> gone;
EXPIRED -> ALIVE, when only the file system was away.

Whether a checkpoint's weights are finite numbers is what its run recorded before it saved them, else what its
safetensors files hold: verl's own trainers record nothing. Weights in another format, or in a damaged file, are known
when they are loaded, where the workers look at them again.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from seamless_verl.runtime.files import write_atomically

TRACKER = "latest_checkpointed_iteration.txt"
RESUME_ANOTHER = (
    "Set trainer.resume_mode=resume_path and trainer.resume_from_path to an earlier checkpoint, or "
    "trainer.resume_mode=disable to begin anew"
)
REFRESH_S = 60.0  # between two refreshes of a marker
EXPIRY_S = 15 * REFRESH_S  # without a refresh, after which another host's marker protects nothing
ENDED = -1.0  # the start time of a process that has ended and whose exit code nobody has collected yet
BOOT, NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, distinguished from a later one with the same id by when it started.

    `started` is in ticks since boot, or in seconds since 1970 where there is no /proc. `system` is the boot and the
    namespace in which `pid` counts, None where there are no such things.
    """

    pid: int
    started: float | None
    system: str | None

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        return cls(pid, start_time(pid), system_id())

    @property
    def is_running(self) -> bool:
        """For a process of this system. Where a start time cannot be seen, any process with its id is taken for it."""
        now = start_time(self.pid)
        return psutil.pid_exists(self.pid) if None in (now, self.started) else now == self.started


def start_time(pid: int) -> float | None:
    """When a process started, by a clock that nobody sets where there is one; None for a process that is not seen."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return ENDED if state in "ZX" else float(fields[18])  # proc(5), fields 3 and 22
    except FileNotFoundError:
        with suppress(psutil.Error):  # also where there is no /proc
            return float(psutil.Process(pid).create_time())
    except ProcessLookupError:  # it ended while it was read
        pass
    return None


def system_id() -> str | None:
    return f"{BOOT.read_text().strip()} {os.readlink(NAMESPACE)}" if BOOT.exists() and NAMESPACE.exists() else None


@dataclass(frozen=True)
class CheckpointMarker:
    """A checkpoint folder before the save of `step`, or before a whole run when `step` is None.

    `tracker` is the tracker file's text and its time of modification in ns, None when there is none.
    """

    run: str
    step: int | None
    steps: list[int]
    tracker: list[str | int] | None
    host: str
    processes: tuple[ProcessIdentity, ...]  # that saves, and its supervisor
    async_save: bool

    @classmethod
    def of(
        cls, folder: Path, run: str, step: int | None, *, supervisor: ProcessIdentity | None, async_save: bool
    ) -> CheckpointMarker:
        steps, host, own = sorted(saved_steps(folder)), socket.gethostname(), ProcessIdentity.of(os.getpid())
        processes = (own,) if supervisor is None else (own, supervisor)
        return cls(run, step, steps, tracker_state(folder), host, processes, async_save)

    @classmethod
    def read(cls, path: Path) -> CheckpointMarker:
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(marker_file(folder, self.run), msgspec.json.encode(self).decode())

    @property
    def on_this_system(self) -> bool:
        """Whether this process could see its processes."""
        system = system_id()
        return self.host == socket.gethostname() and all(process.system == system for process in self.processes)

    def is_alive(self, folder: Path) -> bool:
        """Whether its run may still be saving."""
        if not self.on_this_system:
            return seconds_since_refresh(folder, self.run) < EXPIRY_S
        return any(process.is_running for process in self.processes)

    def begun_steps(self, folder: Path) -> set[int]:
        """The steps whose save began since the marker was written."""
        saved = saved_steps(folder)
        return saved - set(self.steps) if self.step is None else saved & {self.step}

    def finished_steps(self, folder: Path) -> set[int]:
        """Those of them that are complete; a run's steps ascend."""
        state, begun = tracker_state(folder), self.begun_steps(folder)
        if state is None or state == self.tracker:
            return set()
        number = str(state[0])
        if not number:
            return begun
        return {step for step in begun if str(step) == number or (self.step is None and step < int(number))}


def read_markers(folder: Path) -> Iterator[CheckpointMarker]:
    """The markers of all runs in a folder."""
    for path in folder.glob(".saving-*.json"):
        with suppress(FileNotFoundError):  # its run has just finished saving
            yield CheckpointMarker.read(path)


def seconds_since_refresh(folder: Path, run: str) -> float:
    """By the clock of the file system, which every host that shares it has; infinite for a marker that is gone."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as clock:
            return os.fstat(clock.fileno()).st_mtime - marker_file(folder, run).stat().st_mtime
    except FileNotFoundError:  # its run has just finished saving
        return float("inf")


def marker_file(folder: Path, run: str) -> Path:
    return folder / f".saving-{run}.json"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"global_step_{step}"


def saved_steps(folder: Path) -> set[int]:
    numbers = (path.name.removeprefix("global_step_") for path in folder.glob("global_step_*"))
    return {int(number) for number in numbers if number.isdigit()}


def tracker_state(folder: Path) -> list[str | int] | None:
    tracker = folder / TRACKER
    return [tracker.read_text().strip(), tracker.stat().st_mtime_ns] if tracker.exists() else None


def tracked_step(folder: Path) -> int | None:
    """The step from which verl resumes by itself; None where it has nothing to resume from."""
    state = tracker_state(folder)
    step = int(state[0]) if state is not None and str(state[0]).isdigit() else None
    return step if step is not None and step_folder(folder, step).is_dir() else None


RECORD = "finite.json"  # in a checkpoint's folder
EXPONENTS = {"F64": ("<u8", 0x7FF << 52), "F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""Of safetensors' types: as whole numbers, and the bits of the exponent, all 1 in what is not finite."""
PIECE = 1 << 24  # numbers, looked at together


def record_finite(checkpoint: Path) -> None:
    write_atomically(checkpoint / RECORD, json.dumps({"finite": True}))


def weights_not_finite(checkpoint: Path) -> str | None:
    """A tensor of actor or critic that has numbers which are not finite, as `<file>: <name>`; None if none is known."""
    if (checkpoint / RECORD).is_file():
        return None
    files = sorted(checkpoint.glob("*/**/*.safetensors"))
    return next((f"{file}: {name}" for file in files for name in _tensors_not_finite(file)), None)


def _tensors_not_finite(file: Path) -> Iterator[str]:
    import numpy as np

    whole = file.stat().st_size
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(min(size, whole)))
        except ValueError:  # it is damaged
            return
    for name, tensor in header.items():
        if tensor.get("dtype") not in EXPONENTS:  # also the entry of the file itself, __metadata__
            continue
        dtype, exponent = EXPONENTS[tensor["dtype"]]
        begin, end = (8 + size + offset for offset in tensor["data_offsets"])
        if end > whole:
            return
        bits = np.memmap(file, np.uint8, "r")[begin:end].view(dtype)
        if any(((bits[i : i + PIECE] & exponent) == exponent).any() for i in range(0, len(bits), PIECE)):
            yield name
