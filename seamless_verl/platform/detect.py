"""Detects whether a run belongs on the CPU platform, and sets the environment of such a run.

Detection takes milliseconds and does not import torch: it happens before anything is imported, when a run's settings
are read. verl decides the same question in every process with torch. The environment is set once, where the job starts;
children inherit it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path

from seamless_verl.platform.cores import CPU_CORES, PIN

DEVICES_VARIABLE = "SEAMLESS_CPU_DEVICES"
PRESTART = "RAY_prestart_worker_first_driver"  # Ray's: whether a node begins with a worker for each CPU
DEVICES = Path("/dev")
DEVICE_FILES = ("nvidia[0-9]*", "kfd", "davinci[0-9]*")
# In torch/version.py; a CPU build has None for both.
ACCELERATOR_BUILD = re.compile(r"^(?:cuda|hip)\b[^=\n]*=\s*['\"]", re.MULTILINE)


def on_cpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the run belongs on the CPU platform: VERL_PLATFORM says so, or there is no accelerator.

    In a cluster, whose head may lack the accelerators of its other nodes, and with a torch that was built for
    accelerators, only VERL_PLATFORM puts a run on the CPU.
    """
    platform = environ.get("VERL_PLATFORM", "").strip().lower()
    if platform:
        return platform == "cpu"
    return not (in_cluster(environ) or accelerator_present() or torch_is_for_accelerators())


def can_only_be_cpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a run in a cluster, for which no platform is named, has a torch that could use no accelerator anywhere.

    All nodes of a cluster have the same torch, so that such a run belongs on the CPU platform, whatever they have.
    """
    named = environ.get("VERL_PLATFORM", "").strip()
    return in_cluster(environ) and not (named or accelerator_present() or torch_is_for_accelerators())


def usual_platform(environ: Mapping[str, str] = os.environ) -> str:
    """The choice among config/platform/ of a run that names none."""
    return "cpu" if on_cpu(environ) or can_only_be_cpu(environ) else "accelerator"


def in_cluster(environ: Mapping[str, str]) -> bool:
    """Whether RAY_ADDRESS names a cluster to join."""
    return (environ.get("RAY_ADDRESS") or "local") != "local"


def accelerator_present(devices: Path = DEVICES) -> bool:
    return any(any(devices.glob(name)) for name in DEVICE_FILES) or nvidia_smi_answers()


def nvidia_smi_answers() -> bool:
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    try:
        return subprocess.run([command], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False  # a driver that does not answer is no accelerator


def torch_is_for_accelerators() -> bool:
    """Whether the installed torch is a CUDA or ROCm build, by the text of its version file."""
    torch = importlib.util.find_spec("torch")  # does not import it
    if torch is None or torch.origin is None:
        return False
    version = Path(torch.origin).with_name("version.py")
    return version.is_file() and names_accelerator(version.read_text())


def names_accelerator(version: str) -> bool:
    """Whether torch's version file gives a CUDA or HIP version."""
    return ACCELERATOR_BUILD.search(version) is not None


def set_cpu_environment(environ: MutableMapping[str, str], *, cores: Collection[int], devices: int, pin: bool) -> None:
    """Name the platform, its cores and its devices in `environ`; what the user has set stays.

    One thread a process, because a device is one core. No dynamo, because nothing is compiled. Ray starts no workers in
    advance: they would lack the run's runtime environment, and stay idle beside those that have it. oneDNN keeps the
    kernels of 64 shapes and not of 1,024: batches hardly repeat a shape, and an engine grew by 2 MiB a second.
    """
    defaults = {
        "VERL_PLATFORM": "cpu",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "TQ_NUM_THREADS": "1",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        "TOKENIZERS_PARALLELISM": "false",
        PRESTART: "0",
        CPU_CORES: ",".join(str(core) for core in sorted(cores)),
        DEVICES_VARIABLE: str(devices),
        PIN: str(int(pin)),
    }
    for name, value in defaults.items():
        environ.setdefault(name, value)
