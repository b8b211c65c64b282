"""Names the end of Ray's own processes of a cluster that the run started: nobody else says it, or only much later.

Without its GCS all other processes of Ray end a minute later, without an error that names it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading

import ray

from seamless_verl.runtime.console import say
from seamless_verl.runtime.last_screen import KILLED, keep_cause

NEEDED = ("gcs_server", "raylet")
LOG_MONITOR = "log_monitor"
SILENT = (
    "Ray's log monitor has ended, so nothing more that the run's processes print is shown, but its steps are; "
    "what they print is in Ray's logs"
)


def watch_ray_processes() -> None:
    """From now on, in the process that started Ray: one that is needed is the cause of the run's end, if it ends."""
    node = ray._private.worker._global_node  # None in a cluster that was there before
    processes = {} if node is None else node.all_processes
    ended = {name: info[0].process for name in (*NEEDED, LOG_MONITOR) if (info := processes.get(name))}
    if ended:
        threading.Thread(target=_watch, args=(ended,), name="Ray's processes", daemon=True).start()


def _watch(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    ends, names = select.poll(), dict[int, str]()
    for name, process in processes.items():
        try:
            names[handle := os.pidfd_open(process.pid)] = name
        except OSError:  # it has ended, or the system gives out no handles of processes
            continue
        ends.register(handle, select.POLLIN)
    while names:
        for handle, _ in ends.poll():
            ends.unregister(handle)
            os.close(handle)
            if not ray.is_initialized():  # the run ends
                return
            _say_end(name := names.pop(handle), processes[name])


def _say_end(name: str, process: subprocess.Popen[bytes]) -> None:
    code = process.poll()
    by = f" by {signal.Signals(-code).name}, {KILLED}" if code == -signal.SIGKILL else ""
    if name == LOG_MONITOR:
        say(SILENT)
    else:
        keep_cause(f"Ray's process {name} (process id {process.pid}) was ended{by}")
