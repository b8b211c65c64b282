"""Supervisor: a parent process that runs the training as a child, and ends whatever the child leaves behind.

Ray, vLLM and Megatron start processes that start processes. As the "subreaper" of them all (Linux), the supervisor
inherits every orphan. When the child ends, however it ends, the supervisor ends every process that still runs, and
removes the scratch folder with everything temporary. What a killed supervisor left, the next run removes. A Ray
cluster that existed before and is joined is no descendant: nothing of it is touched.

States: RUNNING -> (signal) STOPPING -> (child gone or grace over) SWEEPING -> DONE. A second signal skips the grace,
and the run ends as by the first: with the same exit code, and nothing left. Every state but RUNNING ends in bounded
time, also when a process cannot be killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

import psutil

from seamless_verl.errors import shorten
from seamless_verl.runtime.console import driver_killed, keep_cause, say, stopped_by
from seamless_verl.runtime.scratch import SIGNALS, scratch_folder, session_folder, signals_ignored

GRACE_S = 25.0  # from a signal until the child is killed: Ray needs some seconds to shut down
SWEEP_S = 4.0  # from terminating the remaining processes until they are killed
SWEEPS = 10  # at most so often, for processes that appear while others are ended
LOG_FOLDER_FILE = "run.logs"  # beside the run file: names the folder for Ray's logs of a run that fails
CONNECT_TIMEOUT_S = 1.0  # for a local Ray cluster to accept a connection
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG = 1
INTERRUPTED = 128 + signal.SIGINT  # exit code of a run that was asked to stop, and did, or was asked twice
LOCAL = "local"  # as RAY_ADDRESS: starts a cluster, whatever runs already
RESOURCE_TRACKER = "multiprocessing.resource_tracker"  # unlinks shared memory of the dead, then ends by itself


def supervise(
    command: Sequence[str],
    *,
    run_file_variable: str,
    on_exit: Callable[[Path], None],
    on_end: Callable[[Path], None] = lambda run_file: None,
    ignore_local_cluster: bool = False,
) -> int:
    """Run `command`; returns its exit code, 128 + n for a signal n.

    Args:
        run_file_variable: the environment variable that names a file for the child, its run file, which it may write.
        on_exit: called with that file once every process of the run is gone.
        on_end: called with that file at last, also where a process is left; the file goes with the scratch folder.
        ignore_local_cluster: do not join a Ray cluster that merely happens to run on this machine.

    The child may also choose the folder in which Ray's logs are kept should it fail (`set_log_folder`).
    """
    become_subreaper()
    existing = existing_ray_folder(os.environ, ignore_local_cluster=ignore_local_cluster)
    with scratch_folder() as scratch, nullcontext(scratch) if existing else session_folder(scratch) as session:
        run_file = scratch / "run.json"
        env = os.environ | {
            run_file_variable: str(run_file),
            "TMPDIR": str(scratch),
            "RAY_TMPDIR": existing or str(session),
        }
        child = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=prepare_child)
        code = wait_forwarding_signals(child, lambda number: keep_cause(stopped_by(number), run_file))
        if child.returncode is not None and child.returncode < 0:
            keep_cause(driver_killed(-child.returncode), run_file)
        with signals_ignored():  # an impatient third signal must not cut the sweep short
            with said_if_it_fails():
                unkillable = sweep()
                for process in unkillable:
                    say(f"Process {process.pid} does not end though killed: it waits for a device or a disk")
                if not unkillable:
                    on_exit(run_file)
            if code not in (0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM):
                with said_if_it_fails():
                    keep_logs(session, log_folder(run_file))
            with said_if_it_fails():
                on_end(run_file)
    return code


@contextmanager
def said_if_it_fails() -> Iterator[None]:
    """Around a part of the end of a run, which the other parts do not depend on."""
    try:
        yield
    except Exception as error:
        say(f"A part of the clean-up failed: {type(error).__name__}: {shorten(error)}")


def set_log_folder(folder: Path, run_file: Path) -> None:
    """In the child: keep Ray's logs in `folder` if this run fails."""
    run_file.with_name(LOG_FOLDER_FILE).write_text(str(folder.absolute()))


def log_folder(run_file: Path) -> Path:
    """The folder that the child chose; before it could, the one where hydra has its folders by default."""
    chosen = run_file.with_name(LOG_FOLDER_FILE)
    return Path(chosen.read_text()) if chosen.is_file() else Path("outputs")


def existing_ray_folder(environ: Mapping[str, str], *, ignore_local_cluster: bool) -> str | None:
    """RAY_TMPDIR for a run whose own folder would hide a cluster to join, or overrule the user; else None.

    The workers of a Ray that the run starts inherit TMPDIR and RAY_TMPDIR. Those of a cluster that is joined do not,
    and are given neither: they have the TMPDIR of whoever started the cluster, may be on hosts where the folder does
    not exist, and may still be ending when it is removed. Torch's compile cache goes with it, unless
    TORCHINDUCTOR_CACHE_DIR names one to keep.
    """
    existing = "RAY_TMPDIR" in environ or joins_cluster(environ, ignore_local_cluster=ignore_local_cluster)
    return ray_folder(environ) if existing else None


def ray_folder(environ: Mapping[str, str]) -> str:
    """Where Ray puts its sessions by default."""
    return environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp"


def named_cluster(address: object, environ: Mapping[str, str] = os.environ) -> str:
    """The address by which `ray.init(address=...)` finds a cluster; empty where none is named.

    As Ray 2.60 does it: RAY_ADDRESS counts where `address` is absent or `auto`.
    """
    given = "" if address in (None, "", "auto") else str(address)
    return given or environ.get("RAY_ADDRESS") or str(address or "")


def joins_cluster(environ: Mapping[str, str], *, ignore_local_cluster: bool = False) -> bool:
    """Whether `ray.init()` joins a cluster: RAY_ADDRESS names it, or `ray start` left its address in a file.

    That file outlives a cluster that crashed, so a cluster must also accept a connection.
    """
    if environ.get("RAY_ADDRESS"):
        return environ["RAY_ADDRESS"] != LOCAL
    address_file = Path(ray_folder(environ), "ray", "ray_current_cluster")
    return not ignore_local_cluster and accepts_connections(address_file)


def accepts_connections(address_file: Path) -> bool:
    try:
        host, _, port = address_file.read_text().strip().rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):  # no file, not ours to read, no address in it, or nobody listens
        return False
    return True


def become_subreaper() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def prepare_child() -> None:
    """In the child: heed SIGINT, and be killed when the supervisor is; Ray's processes follow the child.

    A background job of a script starts with SIGINT ignored, and would not receive what is forwarded.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def wait_forwarding_signals(child: subprocess.Popen[bytes], on_signal: Callable[[int], None]) -> int:
    """Wait for the child; the first signal is forwarded with a grace, the second kills. Returns the exit code.

    A child that cannot be killed is left to the sweep, which reports it. `on_signal` is called with each signal,
    before the child has it.
    """
    deadline, signals = float("inf"), 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal deadline, signals
        signals += 1
        on_signal(number)
        deadline = time.monotonic() + (GRACE_S if signals == 1 else 0.0)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGINT if signals == 1 else signal.SIGKILL)

    handled = [
        number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP
    ]  # nohup ignores SIGHUP: so do we
    before = {number: signal.signal(number, forward) for number in handled}
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
    """End every remaining descendant: terminate, wait, kill; again, until none is left. Returns the unkillable."""
    supervisor, unkillable = psutil.Process(), set[psutil.Process]()
    for _ in range(SWEEPS):
        remaining = [process for process in supervisor.children(recursive=True) if process not in unkillable]
        if not remaining:
            break
        unkillable.update(end_processes(remaining))
    return [process for process in supervisor.children(recursive=True) if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False  # it ended just now


def end_processes(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Terminate the processes, then kill them; returns those that ended by neither."""
    for process in processes:
        with suppress(psutil.Error):
            if RESOURCE_TRACKER not in " ".join(process.cmdline()):
                process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=SWEEP_S)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    unkillable: list[psutil.Process] = psutil.wait_procs(alive, timeout=SWEEP_S)[1]
    return unkillable


def keep_logs(session: Path, folder: Path) -> None:
    """Copy Ray's logs of a failed run out of its session's folder, where that takes none into the temporary one.

    Print where they are, or why they are not there.
    """
    for logs in session.glob("ray/session_2*/logs"):
        for parent in (folder, Path(tempfile.gettempdir())):
            kept = parent / f"ray-logs-{os.getpid()}"
            try:
                shutil.copytree(logs, kept, dirs_exist_ok=True, ignore_dangling_symlinks=True)
            except OSError as error:
                say(f"The run failed; Ray's logs should be in {kept}, but: {shorten(error)}")
                shutil.rmtree(kept, ignore_errors=True)
            else:
                say(f"The run failed; Ray's logs are in {kept}")
                break
