"""Whether this machine has an accelerator, answered in milliseconds and without torch.

verl decides the same question in every process with torch at hand; this is for the moment before
anything is imported, when a run's settings are read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

DEVICE_FILES = ("/dev/nvidia0", "/dev/kfd", "/dev/davinci0")


def on_cpu(environ: Mapping[str, str] = os.environ) -> bool:
    """True when the run belongs on the CPU platform: asked for, or with no accelerator in sight."""
    asked = environ.get("VERL_PLATFORM", "").strip().lower()
    return asked == "cpu" if asked else not accelerator_present()


def accelerator_present() -> bool:
    return any(Path(file).exists() for file in DEVICE_FILES) or nvidia_smi_answers()


def nvidia_smi_answers() -> bool:
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    try:
        return subprocess.run([command], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False  # a driver that does not answer is no accelerator
