"""The command by which Ray starts a worker on the CPU platform."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from pathlib import Path

from seamless_verl.platform.adaptation import Adaptation
from seamless_verl.platform.zygote import launcher

PYTHON, LAUNCHER = "SEAMLESS_PYTHON", "SEAMLESS_LAUNCHER"  # as config/platform/cpu.yaml uses them
WORKER_COMMAND = Adaptation(
    "zygote-worker-command",
    "ray._private.runtime_env.context:RuntimeEnvContext.exec_worker",
    "ray 2.60.0",
    "the command of runtime_env.py_executable is run before a worker's script and arguments",
)


def name_worker_command(environ: MutableMapping[str, str]) -> None:
    """Set the variables of which config/platform/cpu.yaml makes `runtime_env.py_executable`; children inherit them."""
    environ.setdefault(PYTHON, sys.executable)
    environ.setdefault(LAUNCHER, str(Path(launcher.__file__).resolve()))
