"""Whether a process has ended, also one that nobody waits for."""

from __future__ import annotations

import time

import psutil


def has_ended(pid: int) -> bool:
    """Also where it ends while it is looked at; a zombie has ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def ends(pid: int, within_s: float = 20.0) -> bool:
    """Whether it ends, or has, within this many seconds."""
    deadline = time.monotonic() + within_s
    while not has_ended(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
