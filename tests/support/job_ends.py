"""Checks that a run that ended, or was stopped, leaves nothing."""

from __future__ import annotations

import os

import psutil

from support.job import Job

WITHOUT_REPLY = "retries remaining"  # Ray's words for calls to an actor that ended before it replied


def stopped(job: Job, moment: str, number: int) -> None:
    """Stops the run when its log has `moment`; nothing of it may be left."""
    job.start().wait_for(moment)
    started = job.descendants()
    assert started
    code = job.stop(number)
    assert code == 130, job.log()[-3000:]
    assert [process for process in started if process.is_running()] == leftovers(job) == []


def leftovers(job: Job) -> list[str]:
    """Processes whose command line has this run's folder, and the files in its TMPDIR."""
    found = (process.info for process in psutil.process_iter(["pid", "cmdline"]) if process.pid != os.getpid())
    processes = [str(info) for info in found if str(job.folder) in " ".join(info["cmdline"] or [])]
    return processes + sorted(os.listdir(job.temporary))
