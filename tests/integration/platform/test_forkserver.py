"""The forkserver: a fork is the process that was asked for, and nothing is left when its owner has gone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from support.forkserver import forkserver, forkserver_with, forkservers, launch, script
from support.processes import ends

from seamless_verl.platform.forkserver import launcher

__all__ = ["forkserver"]
CONFIG = Path(launcher.__file__).parents[2] / "config"
REPORT = """
import gc, json, os, signal, sys
colours = "colorsys" in sys.modules
print(json.dumps({"argv": sys.argv, "cwd": os.getcwd(), "mine": os.environ.get("MINE"), "pid": os.getpid(),
                  "parent": os.getppid(), "nice": os.nice(0), "preloaded": colours, "path": sys.path[:2],
                  "collects": gc.isenabled(), "spared": gc.get_freeze_count(),
                  "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "in": sys.stdin.read()}))
import atexit
atexit.register(print, "at exit")
sys.exit(int(sys.argv[1]))
"""


def test_a_fork_is_the_process_that_was_asked_for(forkserver: dict[str, str], tmp_path: Path) -> None:
    (folder := tmp_path / "work").mkdir()
    forkserver["PYTHONPATH"] = str(tmp_path / "more")
    worker = launch(forkserver, script(tmp_path, REPORT), "7", cwd=folder, preexec_fn=lambda: os.nice(3))
    out, _ = worker.communicate("input")
    report = json.loads(out.splitlines()[0])
    assert report["argv"] == [str(tmp_path / "script.py"), "7"] and report["cwd"] == str(folder)
    assert (report["mine"], report["in"], report["preloaded"], report["interrupt"]) == ("yes", "input", True, True)
    assert report["nice"] == os.nice(0) + 3 and report["parent"] != worker.pid
    assert report["path"] == [str(tmp_path), str(tmp_path / "more")]
    assert report["collects"] and report["spared"] > 10_000  # what had been imported
    assert out.splitlines()[1] == "at exit" and worker.returncode == 7


def test_a_fork_has_its_own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asks_early.py").write_text("import tempfile; tempfile.gettempdir()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with forkserver_with("asks_early", tmp_path) as environ:
        worker = launch(
            environ | {"TMPDIR": str(tmp_path)}, script(tmp_path, "import tempfile; print(tempfile.gettempdir())")
        )
        assert worker.communicate()[0] == f"{tmp_path}\n"


def test_forks_draw_ids_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the forkserver has drawn one, as verl's imports do."""
    draw = "from ray._raylet import ObjectRef, UniqueID; "
    (tmp_path / "draws_early.py").write_text(f"{draw}UniqueID.from_random()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with forkserver_with("draws_early", tmp_path) as environ:
        text = f"{draw}print(*(UniqueID.from_random().hex() for _ in range(200)), ObjectRef.from_random().hex())"
        workers = [launch(environ, script(tmp_path, text)) for _ in range(4)]
        ids = [identity for worker in workers for identity in worker.communicate()[0].split()]
    assert len(ids) == len(set(ids)) == 4 * 201


def test_threads_of_forks_draw_ids_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forkserver imports a class of actors, as verl has. Ray names the calls of a thread by such ids."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "has_actors.py").write_text("import ray\n@ray.remote\nclass Actor: ...\n")
    text = (
        "from concurrent.futures import ThreadPoolExecutor as Pool\nfrom ray._raylet import JobID, TaskID\n"
        "def draw(_): return TaskID.for_fake_task(JobID.from_int(1)).hex()\n"
        "print(draw(0), *Pool(1).map(draw, range(20)), *Pool(1).map(draw, range(20)))"
    )
    with forkserver_with("has_actors", tmp_path, after="ray") as environ:
        workers = [launch(environ, script(tmp_path, text)) for _ in range(4)]
        ids = [identity for worker in workers for identity in worker.communicate()[0].split()]
    assert len(ids) == len(set(ids)) == 4 * 41


@dataclass
class Importing:
    """A forkserver in the first of two imports, which ends when the FIFO `gate` is written to."""

    environ: dict[str, str]
    owner: subprocess.Popen[bytes]
    gate: Path

    def asked(self, *argv: str) -> socket.socket:
        """As a launcher asks that waits."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launcher, "receive_integer", lambda connection: 0)
            return launcher.request_fork(launcher.socket_address(self.environ), argv)[0]

    def waiting(self) -> int:
        """Connections to it, accepted or not."""
        name = "@" + launcher.socket_address(self.environ)[1:]
        return [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()].count(name) - 1


@pytest.fixture
def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Importing]:
    os.mkfifo(gate := tmp_path / "gate")
    begun = tmp_path / "begun"
    (tmp_path / "takes_long.py").write_text(f"open({str(begun)!r}, 'w'); open({str(gate)!r}).read()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    owner = subprocess.Popen(["sleep", "1000"])
    name = f"forkserver-test-{os.getpid()}-{tmp_path.name}"
    environ = {**os.environ, launcher.ADDRESS: name, launcher.NODE: str(owner.pid)}
    assert launcher.start_forkserver(launcher.socket_address(environ), owner.pid, ["takes_long", "colorsys"])
    while not begun.exists():
        assert forkservers()
        time.sleep(0.01)
    yield Importing(environ, owner, gate)
    owner.kill()
    owner.wait()
    psutil.wait_procs(forkservers(), timeout=60)
    assert forkservers() == []


def test_a_fork_is_made_after_all_imports_for_launchers_that_still_wait(importing: Importing, tmp_path: Path) -> None:
    text = f"import sys; open({str(tmp_path)!r} + '/' + sys.argv[1], 'w'); sys.exit(3 + ('colorsys' in sys.modules))"
    late = script(tmp_path, text)
    importing.asked(late, "gone").close()
    waits = importing.asked(late, "waits")
    importing.gate.write_text("")
    launcher.receive_integer(waits)
    assert launcher.receive_integer(waits) == 4, "it was forked before the second import"
    assert (tmp_path / "waits").exists() and not (tmp_path / "gone").exists()


def test_a_launcher_that_waits_for_imports_ends_with_the_node(importing: Importing, tmp_path: Path) -> None:
    waits = launch(importing.environ, script(tmp_path, f"open({str(tmp_path)!r} + '/ran', 'w')"))
    while importing.waiting() < 1:
        assert waits.poll() is None
        time.sleep(0.01)
    importing.owner.kill()
    importing.owner.wait()
    importing.gate.write_text("")
    assert waits.wait(20) == 1 and not (tmp_path / "ran").exists()


def test_forks_run_side_by_side_and_each_exit_code_is_passed_on(forkserver: dict[str, str], tmp_path: Path) -> None:
    wait = script(tmp_path, "import sys; sys.stdin.read(); sys.exit(int(sys.argv[1]))")
    workers = [launch(forkserver, wait, str(code)) for code in range(5)]
    for worker in reversed(workers):
        worker.communicate("")
    assert [worker.returncode for worker in workers] == list(range(5))


def test_a_crash_and_a_signal_are_passed_on(forkserver: dict[str, str], tmp_path: Path) -> None:
    crash = launch(forkserver, script(tmp_path, "raise RuntimeError('broken')"))
    assert "broken" in crash.communicate()[1] and crash.returncode == 1
    kill = launch(forkserver, script(tmp_path, "import os; os.kill(os.getpid(), 9)"))
    assert kill.wait(20) == 128 + signal.SIGKILL


def test_a_signal_to_the_launcher_reaches_the_worker(forkserver: dict[str, str], tmp_path: Path) -> None:
    text = "import signal, sys; signal.signal(15, lambda *_: sys.exit(9)); print('up', flush=True); signal.pause()"
    worker = launch(forkserver, script(tmp_path, text))
    assert worker.stdout is not None and worker.stdout.readline() == "up\n"
    while not catches(worker.pid, signal.SIGTERM):  # the worker may be up before the launcher has heard of it
        time.sleep(0.01)
    worker.terminate()
    assert worker.wait(20) == 9


def catches(process: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for the signal."""
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_without_a_forkserver_the_launcher_becomes_the_worker(tmp_path: Path) -> None:
    environ = {**os.environ, launcher.ADDRESS: "x" * 200}  # longer than a socket's name can be
    worker = launch(environ, script(tmp_path, REPORT), "3")
    out, err = worker.communicate("")
    assert worker.returncode == 3 and "no forkserver" in err
    assert json.loads(out.splitlines()[0])["pid"] == worker.pid


def test_the_first_launcher_of_a_node_starts_its_forkserver(tmp_path: Path) -> None:
    owner = subprocess.Popen(["sleep", "1000"])
    environ = {k: v for k, v in os.environ.items() if k != launcher.ADDRESS} | {launcher.NODE: str(owner.pid)}
    workers = [launch(environ, script(tmp_path, "import os; print(os.getppid())")) for _ in range(3)]
    parents = {worker.communicate()[0] for worker in workers}
    owner.kill()
    owner.wait()
    (parent,) = (int(text) for text in parents)
    assert ends(parent, 30)


def test_the_config_names_an_interpreter_and_the_launcher(tmp_path: Path) -> None:
    environ: dict[str, str] = {"PATH": os.environ["PATH"]}
    launcher.set_worker_command(environ)
    configured = yaml.safe_load((CONFIG / "platform" / "cpu.yaml").read_text())["ray_kwargs"]["ray_init"]
    shell = configured["runtime_env"]["py_executable"].replace(
        "$SEAMLESS_LAUNCHER", script(tmp_path, "print(__file__)")
    )
    out = subprocess.run(
        ["bash", "-c", f"exec {shell}"], env=environ, capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == str(tmp_path / "script.py")
    assert environ[launcher.LAUNCHER] == launcher.__file__ and environ[launcher.PYTHON] == sys.executable
