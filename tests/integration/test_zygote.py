"""The zygote: a fork is the process that was asked for, and nothing is left when its owner has gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from zygote_cases import launch, script, zygote, zygote_with

from seamless_verl.platform.zygote import command, launcher

__all__ = ["zygote"]
CONFIG = Path(command.__file__).parents[2] / "config"
REPORT = """
import json, os, signal, sys
colours = "colorsys" in sys.modules
print(json.dumps({"argv": sys.argv, "cwd": os.getcwd(), "mine": os.environ.get("MINE"), "pid": os.getpid(),
                  "parent": os.getppid(), "nice": os.nice(0), "preloaded": colours, "path": sys.path[:2],
                  "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "in": sys.stdin.read()}))
import atexit
atexit.register(print, "at exit")
sys.exit(int(sys.argv[1]))
"""


def test_a_fork_is_the_process_that_was_asked_for(zygote: dict[str, str], tmp_path: Path) -> None:
    (folder := tmp_path / "work").mkdir()
    zygote["PYTHONPATH"] = str(tmp_path / "more")
    worker = launch(zygote, script(tmp_path, REPORT), "7", cwd=folder, preexec_fn=lambda: os.nice(3))
    out, _ = worker.communicate("said")
    report = json.loads(out.splitlines()[0])
    assert report["argv"] == [str(tmp_path / "script.py"), "7"] and report["cwd"] == str(folder)
    assert (report["mine"], report["in"], report["preloaded"], report["interrupt"]) == ("yes", "said", True, True)
    assert report["nice"] == os.nice(0) + 3 and report["parent"] != worker.pid
    assert report["path"] == [str(tmp_path), str(tmp_path / "more")]
    assert out.splitlines()[1] == "at exit" and worker.returncode == 7


def test_a_fork_has_its_own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asks_early.py").write_text("import tempfile; tempfile.gettempdir()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with zygote_with("asks_early", tmp_path) as environ:
        worker = launch(
            environ | {"TMPDIR": str(tmp_path)}, script(tmp_path, "import tempfile; print(tempfile.gettempdir())")
        )
        assert worker.communicate()[0] == f"{tmp_path}\n"


def test_forks_run_side_by_side_and_each_end_is_told(zygote: dict[str, str], tmp_path: Path) -> None:
    wait = script(tmp_path, "import sys; sys.stdin.read(); sys.exit(int(sys.argv[1]))")
    workers = [launch(zygote, wait, str(code)) for code in range(5)]
    for worker in reversed(workers):
        worker.communicate("")
    assert [worker.returncode for worker in workers] == list(range(5))


def test_a_crash_and_a_signal_are_told(zygote: dict[str, str], tmp_path: Path) -> None:
    crash = launch(zygote, script(tmp_path, "raise RuntimeError('broken')"))
    assert "broken" in crash.communicate()[1] and crash.returncode == 1
    kill = launch(zygote, script(tmp_path, "import os; os.kill(os.getpid(), 9)"))
    assert kill.wait(20) == 128 + signal.SIGKILL


def test_a_signal_to_the_launcher_reaches_the_worker(zygote: dict[str, str], tmp_path: Path) -> None:
    text = "import signal, sys; signal.signal(15, lambda *_: sys.exit(9)); print('up', flush=True); signal.pause()"
    worker = launch(zygote, script(tmp_path, text))
    assert worker.stdout is not None and worker.stdout.readline() == "up\n"
    worker.terminate()
    assert worker.wait(20) == 9


def test_without_a_zygote_the_launcher_becomes_the_worker(tmp_path: Path) -> None:
    environ = {**os.environ, launcher.ADDRESS: "x" * 200}  # longer than a socket's name can be
    worker = launch(environ, script(tmp_path, REPORT), "3")
    out, err = worker.communicate("")
    assert worker.returncode == 3 and "no zygote" in err
    assert json.loads(out.splitlines()[0])["pid"] == worker.pid


def test_the_first_launcher_of_a_node_starts_its_zygote(tmp_path: Path) -> None:
    owner = subprocess.Popen(["sleep", "100"])
    environ = {k: v for k, v in os.environ.items() if k != launcher.ADDRESS} | {launcher.NODE: str(owner.pid)}
    workers = [launch(environ, script(tmp_path, "import os; print(os.getppid())")) for _ in range(3)]
    parents = {worker.communicate()[0] for worker in workers}
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 30
    (parent,) = (int(text) for text in parents)
    while psutil.pid_exists(parent) and psutil.Process(parent).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_config_names_an_interpreter_and_the_launcher(tmp_path: Path) -> None:
    environ: dict[str, str] = {"PATH": os.environ["PATH"]}
    command.name_worker_command(environ)
    configured = yaml.safe_load((CONFIG / "platform" / "cpu.yaml").read_text())["ray_kwargs"]["ray_init"]
    shell = configured["runtime_env"]["py_executable"].replace(
        "$SEAMLESS_LAUNCHER", script(tmp_path, "print(__file__)")
    )
    out = subprocess.run(
        ["bash", "-c", f"exec {shell}"], env=environ, capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == str(tmp_path / "script.py")
    assert environ[command.LAUNCHER] == launcher.__file__ and environ[command.PYTHON] == sys.executable
