"""A parent that leaves nothing behind: it runs the training as a child and outlives all its descendants.

Ray, vLLM and Megatron start processes that start processes. As the "subreaper" of them all (Linux),
this parent inherits every orphan, so that when the child ends, however it ends, whatever still runs
is ended too, and the scratch folder with Ray's session and sockets goes with it.

States: RUNNING -> (signal) STOPPING -> (child gone or grace over) SWEEPING -> DONE. A second signal
skips the grace.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

GRACE_S = 25.0  # from a signal until the child is killed: Ray needs some seconds to shut down
SWEEP_S = 4.0  # from asking the left-over processes to end until they are killed
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG = 1
INTERRUPTED = 128 + signal.SIGINT  # exit code of a run that was asked to stop, and did
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TRACKER = "multiprocessing.resource_tracker"  # unlinks shared memory of the dead, then ends by itself


def supervise(command: Sequence[str], *, marker: str) -> int:
    """Run `command` with the variable `marker` set; returns its exit code, 128 + n for a signal n."""
    become_subreaper()
    with scratch_folder() as scratch:
        env = os.environ | {marker: "1", "RAY_TMPDIR": os.environ.get("RAY_TMPDIR", str(scratch))}
        child = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=prepare_child)
        code = wait_forwarding_signals(child)
        with signals_ignored():  # an impatient third signal must not cut the sweep short
            sweep()
        if code not in (0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM):
            keep_logs(scratch)
    return code


def become_subreaper() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def signals_ignored() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepare_child() -> None:
    """In the child: heed SIGINT, and be killed when the supervisor is; Ray's processes follow the child.

    A background job of a script starts with SIGINT ignored, and would not hear what is forwarded.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for Ray's session, with a path short enough for its sockets."""
    path = Path(tempfile.mkdtemp(prefix="seamless-", dir="/tmp" if Path("/tmp").is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def wait_forwarding_signals(child: subprocess.Popen[bytes]) -> int:
    """Wait for the child; the first signal is passed on with a grace, the second kills."""
    deadline = float("inf")

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal deadline
        first = deadline == float("inf")
        deadline = time.monotonic() + (GRACE_S if first else 0.0)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGINT if first else signal.SIGKILL)

    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP]
    before = {number: signal.signal(number, forward) for number in heeded}  # nohup ignores SIGHUP: so do we
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(timeout=0.2)
                stopped = deadline != float("inf") and code != -signal.SIGKILL
                if stopped:  # an interrupt while Ray starts can surface as any error, even as its crash
                    return INTERRUPTED
                return code if code >= 0 else 128 - code
            if time.monotonic() > deadline:
                child.kill()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def sweep() -> None:
    """End every remaining descendant: ask, wait, kill; again, until none is left."""
    me = psutil.Process()
    while left := me.children(recursive=True):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                if TRACKER not in " ".join(process.cmdline()):
                    process.terminate()
        _, alive = psutil.wait_procs(left, timeout=SWEEP_S)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=SWEEP_S)


def keep_logs(scratch: Path) -> None:
    """Move Ray's logs of a failed run out of the scratch folder, and say where they are."""
    for logs in scratch.glob("ray/session_2*/logs"):
        kept = Path("outputs") / f"ray-logs-{os.getpid()}"
        shutil.copytree(logs, kept, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        sys.stderr.write(f"The run failed; Ray's logs are in {kept}\n")
