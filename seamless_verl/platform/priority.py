"""What a device does on its own, here on a core that it shares with helpers.

A device copies weights into its memory beside what the host's processes do. On the host a load would wait for queues,
agent loops and scores whenever those have work: 12 ms of it took 25.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

FIRST = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK  # before every usual thread; those that are started in it are usual


@contextmanager
def before_helpers() -> Iterator[None]:
    """Meanwhile this thread goes before others on its core, where it may do that (CAP_SYS_NICE, or a limit
    RLIMIT_RTPRIO): for milliseconds only, since helpers have nowhere else to go."""
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, FIRST, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:  # the flag stays: nobody may take it back without the privilege
        os.sched_setscheduler(0, policy | os.SCHED_RESET_ON_FORK, param)
