"""Devices as cores: on the host, device i is the i-th core that the job may use, and processes are pinned to them.

Environment variables carry this between processes; the first two are comma lists of indices:
- `SEAMLESS_CPU_CORES`: the job's cores, written once where the job starts. Device i is its i-th entry.
- `SEAMLESS_VISIBLE_DEVICES`: the devices of one process, written by verl as it writes `CUDA_VISIBLE_DEVICES` on CUDA.
- `SEAMLESS_CPU_PIN=0` lets devices share all cores, as where there are more of them.

Only `pin_process` and `real_time_priority` act on a process; everything else reads a mapping and returns tuples.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from seamless_verl.errors import ConfigError

CPU_CORES = "SEAMLESS_CPU_CORES"
VISIBLE_DEVICES = "SEAMLESS_VISIBLE_DEVICES"
PIN = "SEAMLESS_CPU_PIN"


def parse_indices(key: str, text: str) -> tuple[int, ...]:
    """Return the distinct indices in a comma list such as "1,0", in its own order.

    Raises:
        ConfigError: an entry is no index, the list is empty, or an index comes twice.
    """
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entry.isascii() and entry.isdigit() for entry in entries):
        raise ConfigError(key, text, "it is no comma list of indices", f'Write it as {key}="0,1"')
    indices = tuple(int(entry) for entry in entries)
    if len(set(indices)) != len(indices):
        raise ConfigError(key, text, "an index comes twice", "Name each one once")
    return indices


def job_cores(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the job's cores, device i at position i.

    Raises:
        ConfigError: `SEAMLESS_CPU_CORES` is malformed, or not set where devices were given.
    """
    text = environ.get(CPU_CORES)
    if text is None:
        reason = f"{VISIBLE_DEVICES} is set, so the job's cores must be known"
        raise ConfigError(CPU_CORES, None, reason, f'Export {CPU_CORES}="0,1" where the job starts')
    return parse_indices(CPU_CORES, text)


def device_cores(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the core of each visible device, in the order the devices are named.

    None when nothing is to be pinned: this process was given no devices, or pinning is off.

    Raises:
        ConfigError: a list is malformed or missing, or the job has no such device.
    """
    text = environ.get(VISIBLE_DEVICES)
    if text is None or environ.get(PIN) == "0":
        return None
    cores, devices = job_cores(environ), parse_indices(VISIBLE_DEVICES, text)
    missing = [device for device in devices if device >= len(cores)]
    if missing:
        reason = f"device {missing[0]} does not exist: the job has {len(cores)} cores {list(cores)}"
        raise ConfigError(VISIBLE_DEVICES, text, reason, f"Ask for fewer devices, or widen {CPU_CORES}")
    return tuple(cores[device] for device in devices)


def core_of_rank(cores: tuple[int, ...], rank: int) -> int:
    """Return the core of the process's `rank`-th worker: one worker, one device, one core.

    Raises:
        ConfigError: there are more workers than devices.
    """
    if rank >= len(cores):
        reason = f"worker {rank} has no device of its own, there are {len(cores)}"
        raise ConfigError(VISIBLE_DEVICES, list(cores), reason, "Lower tensor, pipeline or data parallelism")
    return cores[rank]


def thread_binding(cores: tuple[int, ...]) -> str:
    """Return the value of `VLLM_CPU_OMP_THREADS_BIND` that binds rank i to `cores[i]`, such as "0|1"."""
    return "|".join(str(core) for core in cores)


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


THREADS = "/proc/self/task"
POLICY = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK  # before every usual thread; threads started meanwhile are usual


@contextmanager
def real_time_priority() -> Iterator[None]:
    """In the block, this process's threads run before all others on their cores, as a device would load on its own.

    On the host, a load shares its core with queues, agent loops and rewards, and would wait for them, as would the
    message that it has ended: a load of 12 ms took 28.

    Where a process may not do that (it takes CAP_SYS_NICE, or a limit RLIMIT_RTPRIO), or the system has no such
    threads, the block changes nothing. It is for milliseconds only: other processes may have no other core.
    """
    with ExitStack() as restore:
        with suppress(OSError):
            for thread in map(int, os.listdir(THREADS)):
                with suppress(ProcessLookupError):  # it has ended
                    policy, param = os.sched_getscheduler(thread), os.sched_getparam(thread)
                    os.sched_setscheduler(thread, POLICY, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))
                    restore.callback(restore_policy, thread, policy, param)
        yield


def restore_policy(thread: int, policy: int, param: os.sched_param) -> None:
    """All but the flag: clearing that takes the privilege."""
    with suppress(ProcessLookupError):
        os.sched_setscheduler(thread, policy | os.SCHED_RESET_ON_FORK, param)
