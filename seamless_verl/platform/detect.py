"""Whether this machine has an accelerator, answered in milliseconds and without torch.

verl decides the same question in every process with torch at hand; this is for the moment before
anything is imported, when a run's settings are read.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

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
