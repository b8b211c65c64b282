"""Whether this machine has an accelerator, answered in milliseconds and without torch.

verl decides the same question in every process with torch at hand; this is for the moment before
anything is imported, when a run's settings are read.

The environment of a run on the CPU platform, set once where the job starts; children inherit it.
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

DEVICES = Path("/dev")
DEVICE_FILES = ("nvidia[0-9]*", "kfd", "davinci[0-9]*")
BUILT_FOR = re.compile(r"^(?:cuda|hip)\b[^=\n]*=\s*['\"]", re.MULTILINE)  # in torch/version.py; None on a CPU build


def on_cpu(environ: Mapping[str, str] = os.environ) -> bool:
    """True when the run belongs on the CPU platform: asked for, or with no accelerator in sight.

    A cluster may have accelerators that its head has not, and a torch built for them shows that they
    were meant to be there: then a run goes on the CPU only when asked to.
    """
    asked = environ.get("VERL_PLATFORM", "").strip().lower()
    if asked:
        return asked == "cpu"
    in_cluster = (environ.get("RAY_ADDRESS") or "local") != "local"
    return not (in_cluster or accelerator_present() or torch_is_for_accelerators())


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
    return BUILT_FOR.search(version) is not None


DEVICES_VARIABLE = "SEAMLESS_CPU_DEVICES"
PRESTART = "RAY_prestart_worker_first_driver"  # Ray's: whether a node begins with a worker for each CPU


def prepare(environ: MutableMapping[str, str], *, cores: Collection[int], devices: int, pin: bool) -> None:
    """Name the platform, its cores and its devices; what the user has set stays.

    One thread a process, because a device is one core; no dynamo, because nothing is compiled. No workers of Ray's
    before there is work: they would have no runtime environment, and so stand idle beside those that have the run's.
    """
    defaults = {
        "VERL_PLATFORM": "cpu",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "TQ_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        PRESTART: "0",
        CPU_CORES: ",".join(str(core) for core in sorted(cores)),
        DEVICES_VARIABLE: str(devices),
        PIN: str(int(pin)),
    }
    for name, value in defaults.items():
        environ.setdefault(name, value)
