"""Keep a whole process on the cores of its devices."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from seamless_verl.errors import ConfigError
from seamless_verl.platform.cores import CPU_CORES


def pin_process(cores: Collection[int]) -> None:
    """Move every thread of this process to `cores`; threads and children started later inherit it.

    Raises:
        ConfigError: this job may not run on those cores.
    """
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        way_out = f"Set {CPU_CORES} to cores that `taskset -cp $$` lists"
        raise ConfigError(CPU_CORES, sorted(cores), f"cannot be pinned to: {error.strerror}", way_out) from error
    for task in Path("/proc/self/task").iterdir():
        # A thread may end between being listed and being moved.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)
