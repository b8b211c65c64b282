"""Real-time priority for milliseconds, in place of what a device would do on its own.

A device copies weights into its memory while the host's processes do other work. On the host, a load shares its core
with queues, agent loops and rewards, and would wait for them, as would the message that it has ended: a load of 12 ms
took 28.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

THREADS = "/proc/self/task"
POLICY = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK  # before every usual thread; threads started meanwhile are usual


@contextmanager
def real_time_priority() -> Iterator[None]:
    """In the block, this process's threads run before all others on their cores.

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
