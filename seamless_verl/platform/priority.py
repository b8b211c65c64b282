"""What a device does on its own, here on a core that it shares with helpers.

A device copies weights into its memory beside what the host's processes do. On the host a load waits for queues,
agent loops and scores whenever those have work: 12 ms of it took 25. Linux gives each session of processes the same
share of a core (autogroups), whatever their niceness, and Ray's workers and the engines are sessions of their own.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

AUTOGROUP, ENABLED = Path("/proc/self/autogroup"), Path("/proc/sys/kernel/sched_autogroup_enabled")
STATUS = Path("/proc/self/status")
CAP_SYS_ADMIN, CAP_SYS_NICE = 1 << 21, 1 << 23  # without the first an autogroup changes once in 100 ms
FIRST = -10
logger = logging.getLogger(__name__)


@contextmanager
def before_helpers() -> Iterator[None]:
    """Meanwhile this process goes before others on its core, where it may do that: for milliseconds only, since
    helpers have nowhere else to go."""
    niceness = raised() if may_go_first() else None
    try:
        yield
    finally:
        if niceness is not None:
            lower(niceness)


def raised() -> str | None:
    """Goes first; the niceness that was. None where it goes as before: it is in no autogroup, or the system does not
    let it after all, as in a container whose root is none outside."""
    if (found := re.search(r"nice (-?\d+)", AUTOGROUP.read_text())) is None:
        return None
    try:
        AUTOGROUP.write_text(f"{FIRST}")
    except OSError:
        return None
    return found[1]


def lower(niceness: str) -> None:
    """A refusal does not take the place of how the load ended, and is said."""
    try:
        AUTOGROUP.write_text(niceness)
    except OSError as error:
        logger.warning("process %s stays before others on its core: %s", os.getpid(), error)


@functools.cache
def may_go_first() -> bool:
    """Where sessions are autogroups, and this process, which alone says what its session's is, may raise it and lower
    it again."""
    if os.getsid(0) != os.getpid() or not ENABLED.exists() or ENABLED.read_text().strip() != "1":
        return False
    effective = int(re.findall(r"CapEff:\s*([0-9a-f]+)", STATUS.read_text())[0], 16)
    return os.access(AUTOGROUP, os.W_OK) and not (CAP_SYS_ADMIN | CAP_SYS_NICE) & ~effective
