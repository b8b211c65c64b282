"""How busy a run's devices are, seen from outside, alike for every trainer: what its own accounts say is not used.

On accelerators it is what their driver says (NVML): the share of time in which a kernel ran. On the CPU platform a
device is a core, to which its trainer and its engine are pinned. Such a process is busy while it runs or waits for its
core, as the system's scheduler counts it (/proc/<pid>/task/*/schedstat, fields 1 and 2, in ns); a device is busy while
any of its processes is, at most all of the time. A process that polls counts as busy, in every arm.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from seamless_verl.platform.nvml import VARIABLE, NvmlUtilization

PERIOD_S = 0.5
LOOK_S = 5.0  # between two looks for processes that have begun: it reads all of /proc


@dataclass(frozen=True)
class UseSample:
    """The busy share of each device from `began` to `ended`, in seconds by `time.monotonic`."""

    began: float
    ended: float
    shares: tuple[float, ...]


Read = Callable[[], Sequence[float]]
"""Gives the share of time for which each device was busy since the last call; none where nothing is known."""


class CoreUse:
    """The cores to which the processes below `pid` are pinned, one each; `cores` are those of the run's devices."""

    def __init__(self, pid: int, cores: Sequence[int]) -> None:
        self.root, self.cores = psutil.Process(pid), tuple(cores)
        self.pinned: dict[int, int] = {}  # core by process
        self.busy: dict[int, int] = {}  # ns by process, at the last call
        self.at, self.looked = time.monotonic(), 0.0

    def read(self) -> Sequence[float]:
        now = time.monotonic()
        if now - self.looked >= LOOK_S:
            self.pinned, self.looked = self.find(), now
        busy = {pid: nanoseconds for pid in self.pinned if (nanoseconds := busy_ns(pid)) is not None}
        seconds = defaultdict[int, float](float)
        for pid in busy.keys() & self.busy.keys():
            seconds[self.pinned[pid]] += max(0, busy[pid] - self.busy[pid]) / 1e9
        elapsed, self.at, self.busy = now - self.at, now, busy
        return shares(seconds, self.cores, elapsed) if self.pinned else ()

    def find(self) -> dict[int, int]:
        """The processes that may run on one core alone."""
        found: dict[int, int] = {}
        with suppress(psutil.NoSuchProcess):
            for process in self.root.children(recursive=True):
                with suppress(psutil.Error, OSError):
                    allowed = os.sched_getaffinity(process.pid)
                    if len(allowed) == 1 and allowed <= set(self.cores):
                        found[process.pid] = min(allowed)
        return found


def busy_ns(pid: int) -> int | None:
    """For how long the threads of a process have run or waited for a core; None when it has ended."""
    total = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                ran, waited, _ = (task / "schedstat").read_text().split()
                total += int(ran) + int(waited)
    except FileNotFoundError:
        return None
    return total


def shares(seconds: Mapping[int, float], cores: Sequence[int], elapsed: float) -> tuple[float, ...]:
    """Busy seconds as shares of the time, at most 1, in the order of the cores."""
    return tuple(min(1.0, seconds.get(core, 0.0) / elapsed) if elapsed > 0 else 0.0 for core in cores)


def unseen(devices: int, local: int | None, machines: int) -> str:
    """Why the devices of a run cannot all be seen from here, as the end of a sentence; "" if they can.

    Idle time of some of them would pass for that of all.

    Args:
        devices: those of the run.
        local: those of this machine; None where NVML does not say.
        machines: how many the run's devices are spread over, as far as its settings say.
    """
    if machines > 1:
        return f"they are on {machines} machines, and only this machine's can be seen"
    if local is None:
        return "NVML cannot be used here"
    return f"there are {devices}, and {local} on this machine, of which alone they can be seen" * (devices > local)


def nvml_use(devices: int) -> Read | None:
    """What NVML says of the first devices that this process sees; None where there is no NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    names = os.environ.get(VARIABLE, ",".join(map(str, range(devices)))).split(",")
    try:
        use: Read = NvmlUtilization(names[:devices], pynvml).read
    except pynvml.NVMLError:
        return None
    return use


class UseSampler:
    """Owns a thread that calls `read` every `PERIOD_S` until `close`; `samples` has what it read."""

    def __init__(self, read: Read) -> None:
        self._read, self.samples = read, list[UseSample]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device-use", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(PERIOD_S):
            found = tuple(self._read())
            now = time.monotonic()
            if found:
                self.samples.append(UseSample(before, now, found))
            before = now


def idle_between(samples: Sequence[UseSample], began: float, ended: float) -> float | None:
    """The idle share of all devices between two times; None without a sample within."""
    within = [sample for sample in samples if began <= sample.began and sample.ended <= ended]
    seconds = sum(sample.ended - sample.began for sample in within)
    if not within or seconds <= 0:
        return None
    busy = sum(sum(sample.shares) / len(sample.shares) * (sample.ended - sample.began) for sample in within)
    return 1.0 - busy / seconds
