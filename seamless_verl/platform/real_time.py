"""What a device does on its own, here on a core that it shares with helpers.

A device copies weights into its memory beside what the host's processes do. On the host a load would wait for queues,
agent loops and scores whenever those have work, and so would the word that it is done: 12 ms of it took 28.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

THREADS = "/proc/self/task"
FIRST = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK  # before every usual thread; those that are started in it are usual


@contextmanager
def real_time_priority() -> Iterator[None]:
    """Meanwhile this process's threads go before others on their core, where they may do that (CAP_SYS_NICE, or a limit
    RLIMIT_RTPRIO) and the system has such threads: for milliseconds only, since helpers have nowhere else to go."""
    with ExitStack() as raised:
        with suppress(OSError):
            for thread in map(int, os.listdir(THREADS)):
                with suppress(ProcessLookupError):  # it has ended
                    policy, param = os.sched_getscheduler(thread), os.sched_getparam(thread)
                    os.sched_setscheduler(thread, FIRST, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))
                    raised.callback(lower, thread, policy, param)
        yield


def lower(thread: int, policy: int, param: os.sched_param) -> None:
    """As it was, but for the flag: nobody may take that back without the privilege."""
    with suppress(ProcessLookupError):
        os.sched_setscheduler(thread, policy | os.SCHED_RESET_ON_FORK, param)
