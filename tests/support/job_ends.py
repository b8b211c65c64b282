"""What a run leaves when it has ended, or was stopped: nothing."""

from __future__ import annotations

import os

import psutil

from support.job import Job

UNANSWERED = "retries remaining"  # as Ray says it of calls to an actor that ended before it answered them


def stopped(job: Job, moment: str, number: int) -> None:
    """Stop the run at a moment of its log; nothing of it may be left."""
    job.start().wait_for(moment)
    started = job.descendants()
    assert started
    code = job.stop(number)
    assert code == 130, job.log()[-3000:]
    assert [process for process in started if process.is_running()] == leftovers(job) == []


def leftovers(job: Job) -> list[str]:
    """Processes that mention this run's folder, and what is in its TMPDIR."""
    found = (process.info for process in psutil.process_iter(["pid", "cmdline"]) if process.pid != os.getpid())
    processes = [str(info) for info in found if str(job.folder) in " ".join(info["cmdline"] or [])]
    return processes + sorted(os.listdir(job.temporary))
