"""The processes of a job's replicas."""

from __future__ import annotations

from contextlib import suppress

import psutil

from support.job import Job


def servers(job: Job) -> list[psutil.Process]:
    """The server actors of the replicas."""
    return [one for one in job.descendants() if "SeamlessServer" in words(one)]


def engines(job: Job) -> list[psutil.Process]:
    """Forked from the process that has imported the stack, whose command line they keep."""
    forked = [one for one in job.descendants() if "forkserver/server.py" in words(one)]
    return [one for one in forked if one.ppid() in {other.pid for other in forked}]


def words(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""
