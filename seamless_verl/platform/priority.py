"""What a device does on its own, here on a core that it shares with helpers.

A device copies weights into its memory beside what the host's processes do. On the host a load waits for queues,
agent loops and scores whenever those have work: 12 ms of it took 25. Linux gives each session of processes the same
share of a core (autogroups), whatever their niceness, and Ray's workers and the engines are sessions of their own.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

AUTOGROUP, ENABLED = Path("/proc/self/autogroup"), Path("/proc/sys/kernel/sched_autogroup_enabled")
STATUS = Path("/proc/self/status")
CAP_SYS_ADMIN, CAP_SYS_NICE = 1 << 21, 1 << 23  # without the first an autogroup changes once in 100 ms
FIRST = -10


@contextmanager
def before_helpers() -> Iterator[None]:
    """Meanwhile this process goes before others on its core, where it may do that: for milliseconds only, since
    helpers have nowhere else to go."""
    niceness = raised() if may_go_first() else None
    try:
        yield
    finally:
        if niceness is not None:
            with suppress(OSError):  # the load's own end counts
                AUTOGROUP.write_text(niceness)


def raised() -> str | None:
    """Goes first; the niceness that was, None where the system does not let it after all, as in a container whose
    root is none outside."""
    found = re.search(r"nice (-?\d+)", AUTOGROUP.read_text())
    try:
        AUTOGROUP.write_text(f"{FIRST}")
    except OSError:
        return None
    return None if found is None else found[1]


@functools.cache
def may_go_first() -> bool:
    """Where sessions are autogroups, and this process, which alone says what its session's is, may raise it and lower
    it again."""
    if os.getsid(0) != os.getpid() or not ENABLED.exists() or ENABLED.read_text().strip() != "1":
        return False
    effective = int(re.findall(r"CapEff:\s*([0-9a-f]+)", STATUS.read_text())[0], 16)
    return os.access(AUTOGROUP, os.W_OK) and not (CAP_SYS_ADMIN | CAP_SYS_NICE) & ~effective
