"""A run that is killed leaves only finished checkpoints, whoever tidies up after it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import checkpoints

from seamless_verl.runtime.checkpoint_cleanup import RUN_FILE, Leftovers, announce
from seamless_verl.runtime.checkpoint_marker import TRACKER, Life, Mark, saved_steps

pytestmark = pytest.mark.integration


KILLED = """
import os, signal, sys
from pathlib import Path
from seamless_verl.supervisor import supervise
from seamless_verl.trainer import partial
from support.checkpoints import save
folder = Path("checkpoints")
if "child" in sys.argv:
    os.environ[partial.RUN_FILE] = os.environ.pop("M")
    partial.announce("checkpoints", async_save=False, seamless="seamless" in sys.argv)
    with partial.saving("checkpoints", 1):
        save(folder, 1)
    with partial.saving("checkpoints", 2):
        save(folder, 2, finish="finish" in sys.argv)
        os.kill(os.getppid() if "supervisor" in sys.argv else os.getpid(), signal.SIGKILL)
        signal.pause()
def tidy(run_file):
    print(*[path.name for path in partial.discard_partial(run_file).removed])
sys.exit(supervise([sys.executable, *sys.argv, "child"], marker="M", afterwards=tidy))
"""


@pytest.mark.parametrize("mode", ["seamless", "sync"])
@pytest.mark.parametrize(("how", "removed", "kept"), [("torn", "global_step_2", {1}), ("finish", "", {1, 2})])
def test_the_supervisor_tidies_up_after_a_killed_child(
    tmp_path: Path, mode: str, how: str, removed: str, kept: set[int]
) -> None:
    (tmp_path / "main.py").write_text(KILLED)
    env = os.environ | {"PYTHONPATH": str(Path(checkpoints.__file__).parent)}
    command = [sys.executable, "main.py", mode, how]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    folder = tmp_path / "checkpoints"
    assert (done.returncode, done.stdout.strip()) == (137, removed), done.stderr
    assert saved_steps(folder) == kept and (folder / TRACKER).read_text() == str(max(kept))
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("mode", ["seamless", "sync"])
def test_the_next_run_tidies_up_after_a_killed_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv(RUN_FILE, str(tmp_path / "run.json"))
    (tmp_path / "main.py").write_text(KILLED)
    env = os.environ | {"PYTHONPATH": str(Path(checkpoints.__file__).parent)}
    folder = tmp_path / "checkpoints"
    with subprocess.Popen([sys.executable, "main.py", mode, "supervisor"], cwd=tmp_path, env=env) as killed:
        assert killed.wait(30) == -9
    (mark,) = folder.glob(".saving-*")
    child = Mark.read(mark).pid
    deadline = time.monotonic() + 10
    while Life.of(child).started not in (None, -1.0) and time.monotonic() < deadline:
        time.sleep(0.01)  # it dies with its supervisor
    assert saved_steps(folder) == {1, 2}
    left = announce(str(folder), seamless=True, async_save=False)
    assert left == Leftovers(removed=(folder / "global_step_2",))
    assert saved_steps(folder) == {1} and (folder / TRACKER).read_text() == "1"
    assert not list(folder.glob(".*"))


def test_a_process_that_has_the_id_of_a_dead_one_is_not_taken_for_it(tmp_path: Path) -> None:
    me = Life.of(os.getpid())
    assert me.started is not None and me.goes_on and Life(me.pid, None, me.system).goes_on
    assert not Life(me.pid, me.started - 1, me.system).goes_on
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE) as child:
        life = Life.of(child.pid)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not life.goes_on  # ended, and nobody has asked for it yet
