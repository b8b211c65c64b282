"""What a fork spawns with multiprocessing is a fork of the forkserver too, and behaves as a spawned process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.forkserver import forkserver, launch, script
from support.processes import ends

from seamless_verl.platform.forkserver import launcher

__all__ = ["forkserver"]
PARENT = """
import json, multiprocessing.connection, os, signal, sys, time

def child(pipe, lock):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(8))
    out = {"pid": os.getpid(), "parent": os.getppid(), "preloaded": "colorsys" in sys.modules,
           "mine": os.environ["MINE"], "cores": sorted(os.sched_getaffinity(0)), "path": sys.path, "argv": sys.argv,
           "main": sys.modules["__main__"].__name__, "descriptors": os.listdir("/proc/self/fd")}
    with lock:
        pipe.send(out)
    try:
        sys.exit(pipe.recv())
    except EOFError:
        sys.exit(6)

def terminate(process):
    handled = 0  # the child may be up before the process that stands for it has its handler
    while not handled >> (signal.SIGTERM - 1) & 1:
        time.sleep(0.01)
        with open(f"/proc/{process.pid}/status") as status:
            handled = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt:"))
    process.terminate()

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    (ours, theirs), lock = spawn.Pipe(), spawn.Lock()
    os.environ["MINE"] = "changed"
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    process = spawn.Process(target=child, args=(theirs, lock))
    process.start()
    theirs.close()
    own = {"pid": os.getpid(), "process": process.pid, "path": sys.path, "argv": sys.argv, "parent": os.getppid(),
           "cores": sorted(os.sched_getaffinity(0))}
    print(json.dumps({"parent": own, "child": ours.recv()}), flush=True)
    exec(sys.argv[1])
    process.join()
    print(process.exitcode, flush=True)
"""


class Spawned:
    """A parent in a fork, its child, and the report of each; `act` is what the parent does then."""

    def __init__(self, environ: dict[str, str], folder: Path, act: str) -> None:
        self.process = launch(environ, script(folder, PARENT), act)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        both: dict[str, dict[str, Any]] = json.loads(line)
        self.parent, self.child = both["parent"], both["child"]

    def exit_code(self) -> int:
        assert self.process.stdout is not None and self.process.stderr is not None
        out = self.process.stdout.read()
        assert self.process.wait(30) == 0, self.process.stderr.read()
        return int(out)


def test_a_spawned_process_is_a_fork_and_has_what_it_would_have(forkserver: dict[str, str], tmp_path: Path) -> None:
    spawned = Spawned(forkserver, tmp_path, "ours.send(7)")
    parent, child = spawned.parent, spawned.child
    assert child["preloaded"] and child["parent"] == parent["parent"] and child["pid"] != parent["process"]
    assert child["mine"] == "changed" and len(child["cores"]) == 1 and child["cores"] == parent["cores"]
    assert (child["path"], child["argv"], child["main"]) == (parent["path"], parent["argv"], "__mp_main__")
    assert spawned.exit_code() == 7 and ends(child["pid"])


def test_it_has_the_descriptors_of_a_real_one(forkserver: dict[str, str], tmp_path: Path) -> None:
    """As many, since both parents do the same: none of the forkserver's own, and none of another worker."""
    bystander = Spawned(forkserver, tmp_path, "time.sleep(100)")
    forked = Spawned(forkserver, tmp_path, "ours.send(0)")
    real = Spawned(forkserver | {launcher.ADDRESS: "x" * 200}, tmp_path, "ours.send(0)")
    assert not real.child["preloaded"]
    assert len(forked.child["descriptors"]) == len(real.child["descriptors"])
    assert forked.exit_code() == real.exit_code() == 0
    bystander.process.terminate()
    bystander.process.communicate()
    assert ends(bystander.child["pid"])


@pytest.mark.parametrize(("act", "code"), [("terminate(process)", 8), ("process.kill()", -signal.SIGKILL)])
def test_it_ends_with_the_process_that_stands_for_it(
    forkserver: dict[str, str], tmp_path: Path, act: str, code: int
) -> None:
    """While its parent lives on, whose end would end it too."""
    spawned = Spawned(forkserver, tmp_path, f"{act}; sys.stdin.read()")
    assert ends(spawned.child["pid"])
    assert spawned.process.stdin is not None
    spawned.process.stdin.close()
    assert spawned.exit_code() == code


def test_it_sees_that_its_parent_was_killed(forkserver: dict[str, str], tmp_path: Path) -> None:
    """By the end of a pipe, so nobody else holds the parent's end; nor then do launchers stay."""
    spawned = Spawned(forkserver, tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert spawned.process.wait(20) == 128 + signal.SIGKILL
    assert ends(spawned.child["pid"]) and ends(spawned.parent["process"])


def test_its_parent_sees_that_it_was_killed(forkserver: dict[str, str], tmp_path: Path) -> None:
    spawned = Spawned(forkserver, tmp_path, "assert multiprocessing.connection.wait([process.sentinel], 20)")
    os.kill(spawned.child["pid"], signal.SIGKILL)
    assert spawned.exit_code() == 128 + signal.SIGKILL


def test_nothing_outlives_a_forkserver_that_was_killed(forkserver: dict[str, str], tmp_path: Path) -> None:
    spawned = Spawned(forkserver, tmp_path, "pass")
    os.kill(spawned.child["parent"], signal.SIGKILL)
    assert all(ends(pid) for pid in (spawned.child["pid"], spawned.parent["process"], spawned.parent["pid"]))


def test_another_interpreter_is_left_alone(forkserver: dict[str, str], tmp_path: Path) -> None:
    text = """
from multiprocessing import spawn
spawn.set_executable("/elsewhere/python")
print(*spawn.get_command_line(pipe_handle=3))
"""
    out, _ = launch(forkserver, script(tmp_path, text)).communicate()
    assert "/elsewhere/python" in out and "-c from multiprocessing" in out and "launcher" not in out


def test_a_socket_that_is_bound_will_listen(tmp_path: Path) -> None:
    environ = {**os.environ, launcher.ADDRESS: f"forkserver-test-{os.getpid()}-{tmp_path.name}"}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(launcher.socket_address(environ))
        server.settimeout(20)
        worker = subprocess.Popen([sys.executable, "-IS", launcher.__file__, "-c", "pass"], env=environ)
        time.sleep(0.3)  # it has been refused by now
        server.listen()
        server.accept()[0].close()
    assert worker.wait(20) == 0
