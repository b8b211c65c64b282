"""A parent that leaves nothing behind: it runs the training as a child and outlives all its descendants.

Ray, vLLM and Megatron start processes that start processes. As the "subreaper" of them all (Linux),
this parent inherits every orphan, so that when the child ends, however it ends, whatever still runs
is ended too, and the scratch folder with everything temporary goes with it; what a killed supervisor left
goes with the next run. A Ray cluster that was there before and is joined is no descendant: nothing of it is touched.

States: RUNNING -> (signal) STOPPING -> (child gone or grace over) SWEEPING -> DONE. A second signal
skips the grace, and the run ends as by the first: with the same code, and nothing left. Every state but
RUNNING ends in bounded time, also when a process cannot be killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType

import psutil

from seamless_verl.runtime.scratch import SIGNALS, scratch_folder, session_folder, signals_ignored

GRACE_S = 25.0  # from a signal until the child is killed: Ray needs some seconds to shut down
SWEEP_S = 4.0  # from asking the left-over processes to end until they are killed
SWEEPS = 10  # at most so often, for processes that appear while others are ended
LOGS = "run.logs"  # beside the child's file: the folder for Ray's logs of a run that fails
ANSWER_S = 1.0  # for a local Ray cluster to accept a connection
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG = 1
INTERRUPTED = 128 + signal.SIGINT  # exit code of a run that was asked to stop, and did, or was asked twice
TRACKER = "multiprocessing.resource_tracker"  # unlinks shared memory of the dead, then ends by itself


def supervise(command: Sequence[str], *, marker: str, afterwards: Callable[[Path], None], alone: bool = False) -> int:
    """Run `command`; returns its exit code, 128 + n for a signal n.

    The variable `marker` names a file the child may write; `afterwards` gets it once every process of
    the run is gone. The child may also say in which folder to keep Ray's logs should it fail (`logs_belong_in`).
    `alone` keeps the run out of a Ray cluster that merely happens to run here.
    """
    become_subreaper()
    elsewhere = session_elsewhere(os.environ, alone=alone)
    with scratch_folder() as scratch, nullcontext(scratch) if elsewhere else session_folder(scratch) as session:
        note = scratch / "run.json"
        env = os.environ | {marker: str(note), "TMPDIR": str(scratch), "RAY_TMPDIR": elsewhere or str(session)}
        child = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=prepare_child)
        code = wait_forwarding_signals(child)
        with signals_ignored():  # an impatient third signal must not cut the sweep short
            unkillable = sweep()
            for process in unkillable:
                sys.stderr.write(f"Process {process.pid} does not end though killed: it waits for a device or a disk\n")
            if not unkillable:
                afterwards(note)
        if code not in (0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM):
            keep_logs(session, folder_of_logs(note))
    return code


def logs_belong_in(folder: Path, note: Path) -> None:
    """In the child, whose file is `note`: Ray's logs of this run belong there, if it fails."""
    note.with_name(LOGS).write_text(str(folder.absolute()))


def folder_of_logs(note: Path) -> Path:
    """Where the child said; else, as when it failed before it could, where hydra has its folders by default."""
    said = note.with_name(LOGS)
    return Path(said.read_text()) if said.is_file() else Path("outputs")


def session_elsewhere(environ: Mapping[str, str], *, alone: bool) -> str | None:
    """RAY_TMPDIR for a run whose own folder would hide a cluster to join, or overrule the user; else None.

    The workers of a Ray that the run starts inherit TMPDIR and RAY_TMPDIR. Those of a cluster that is joined do not,
    and are given neither: they have the TMPDIR of whoever started the cluster, may be on hosts where the folder is
    not, and may still be ending when it is removed. Torch's compile cache goes with it, unless
    TORCHINDUCTOR_CACHE_DIR names one to keep.
    """
    elsewhere = "RAY_TMPDIR" in environ or joins_cluster(environ, named_only=alone)
    return ray_folder(environ) if elsewhere else None


def ray_folder(environ: Mapping[str, str]) -> str:
    """Where Ray would have its sessions by itself."""
    return environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp"


def joins_cluster(environ: Mapping[str, str], *, named_only: bool = False) -> bool:
    """Whether `ray.init()` joins a cluster: RAY_ADDRESS names it, or `ray start` left its address in a file.

    That file outlives a cluster that crashed; one that does not answer is none.
    """
    if environ.get("RAY_ADDRESS"):
        return environ["RAY_ADDRESS"] != "local"
    return not named_only and answers(Path(ray_folder(environ), "ray", "ray_current_cluster"))


def answers(address_file: Path) -> bool:
    try:
        host, _, port = address_file.read_text().strip().rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, ValueError):  # no file, not ours to read, no address in it, or nobody there
        return False
    return True


def become_subreaper() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def prepare_child() -> None:
    """In the child: heed SIGINT, and be killed when the supervisor is; Ray's processes follow the child.

    A background job of a script starts with SIGINT ignored, and would not hear what is forwarded.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def wait_forwarding_signals(child: subprocess.Popen[bytes]) -> int:
    """Wait for the child; the first signal is passed on with a grace, the second kills.

    A child that cannot be killed is left to the sweep, which names it.
    """
    deadline, signals = float("inf"), 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal deadline, signals
        signals += 1
        deadline = time.monotonic() + (GRACE_S if signals == 1 else 0.0)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGINT if signals == 1 else signal.SIGKILL)

    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP]
    before = {number: signal.signal(number, forward) for number in heeded}  # nohup ignores SIGHUP: so do we
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(timeout=0.2)
                killed = code == -signal.SIGKILL and signals < 2  # by the end of its grace, or by others
                if signals and not killed:  # an interrupt while Ray starts can surface as any error, even as its crash
                    return INTERRUPTED
                return code if code >= 0 else 128 - code
            if time.monotonic() > deadline:
                child.kill()
            if time.monotonic() > deadline + SWEEP_S:
                return 128 + signal.SIGKILL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def sweep() -> list[psutil.Process]:
    """End every remaining descendant: ask, wait, kill; again, until none is left. Returns the unkillable."""
    me, stuck = psutil.Process(), set[psutil.Process]()
    for _ in range(SWEEPS):
        left = [process for process in me.children(recursive=True) if process not in stuck]
        if not left:
            break
        stuck.update(end(left))
    return [process for process in me.children(recursive=True) if lives(process)]


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False  # it ended just now


def end(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Ask the processes to end, then kill; returns those that did neither."""
    for process in processes:
        with suppress(psutil.Error):
            if TRACKER not in " ".join(process.cmdline()):
                process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=SWEEP_S)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    stuck: list[psutil.Process] = psutil.wait_procs(alive, timeout=SWEEP_S)[1]
    return stuck


def keep_logs(session: Path, folder: Path) -> None:
    """Copy Ray's logs of a failed run out of its session's folder, and say where they are or why they are not."""
    for logs in session.glob("ray/session_2*/logs"):
        kept = folder / f"ray-logs-{os.getpid()}"
        try:
            shutil.copytree(logs, kept, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        except OSError as error:
            sys.stderr.write(f"The run failed; Ray's logs should be in {kept}, but: {error}\n")
        else:
            sys.stderr.write(f"The run failed; Ray's logs are in {kept}\n")
