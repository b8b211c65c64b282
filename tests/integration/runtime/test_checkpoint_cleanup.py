"""A run that is killed leaves only finished checkpoints: its supervisor cleans up, or the next run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.paths import child_environment

from seamless_verl.runtime.checkpoint_cleanup import CleanupReport, register_run
from seamless_verl.runtime.checkpoint_marker import TRACKER, CheckpointMarker, ProcessIdentity, saved_steps
from seamless_verl.runtime.console import RUN_FILE

pytestmark = pytest.mark.integration


KILLED = """
import os, signal, sys
from pathlib import Path
from seamless_verl.runtime.supervisor import supervise
from seamless_verl.runtime import checkpoint_cleanup, console
from support.checkpoints import save
folder = Path("checkpoints")
if "child" in sys.argv:
    os.environ[console.RUN_FILE] = os.environ.pop("M")
    checkpoint_cleanup.register_run("checkpoints", async_save=False, seamless="seamless" in sys.argv)
    with checkpoint_cleanup.marked_save("checkpoints", 1):
        save(folder, 1)
    with checkpoint_cleanup.marked_save("checkpoints", 2):
        save(folder, 2, finish="finish" in sys.argv)
        os.kill(os.getppid() if "supervisor" in sys.argv else os.getpid(), signal.SIGKILL)
        signal.pause()
def clean_up(run_file):
    print(*[path.name for path in checkpoint_cleanup.clean_up_run(run_file).removed])
sys.exit(supervise([sys.executable, *sys.argv, "child"], run_file_variable="M", on_exit=clean_up))
"""


@pytest.mark.parametrize("mode", ["seamless", "sync"])
@pytest.mark.parametrize(("how", "removed", "kept"), [("incomplete", "global_step_2", {1}), ("finish", "", {1, 2})])
def test_the_supervisor_cleans_up_after_a_killed_child(
    tmp_path: Path, mode: str, how: str, removed: str, kept: set[int]
) -> None:
    (tmp_path / "main.py").write_text(KILLED)
    env = os.environ | child_environment()
    command = [sys.executable, "main.py", mode, how]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    folder = tmp_path / "checkpoints"
    assert (done.returncode, done.stdout.strip()) == (137, removed), done.stderr
    assert saved_steps(folder) == kept and (folder / TRACKER).read_text() == str(max(kept))
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("mode", ["seamless", "sync"])
def test_the_next_run_cleans_up_after_a_killed_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv(RUN_FILE, str(tmp_path / "run.json"))
    (tmp_path / "main.py").write_text(KILLED)
    env = os.environ | child_environment()
    folder = tmp_path / "checkpoints"
    with subprocess.Popen([sys.executable, "main.py", mode, "supervisor"], cwd=tmp_path, env=env) as killed:
        assert killed.wait(30) == -9
    (marker,) = folder.glob(".saving-*")
    child = CheckpointMarker.read(marker).processes[0].pid
    deadline = time.monotonic() + 10
    while ProcessIdentity.of(child).started not in (None, -1.0) and time.monotonic() < deadline:
        time.sleep(0.01)  # it dies with its supervisor
    assert saved_steps(folder) == {1, 2}
    report = register_run(str(folder), seamless=True, async_save=False)
    assert report == CleanupReport(removed=(folder / "global_step_2",))
    assert saved_steps(folder) == {1} and (folder / TRACKER).read_text() == "1"
    assert not list(folder.glob(".*"))


def test_a_process_that_has_the_id_of_a_dead_one_is_not_taken_for_it(tmp_path: Path) -> None:
    me = ProcessIdentity.of(os.getpid())
    assert me.started is not None and me.is_running and ProcessIdentity(me.pid, None, me.system).is_running
    assert not ProcessIdentity(me.pid, me.started - 1, me.system).is_running
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE) as child:
        process = ProcessIdentity.of(child.pid)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not process.is_running  # ended, and nobody has asked for it yet
