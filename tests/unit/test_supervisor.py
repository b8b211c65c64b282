"""The supervisor: its child's exit code, its signals, and every process the child ever started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

RUN = "import sys; from seamless_verl.supervisor import supervise; sys.exit(supervise(sys.argv[1:], marker='M'))"


def supervised(code: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN, sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


ORPHANS = """
    import os, subprocess, sys
    for i in range(3):
        p = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print(p.pid, os.environ["RAY_TMPDIR"], flush=True)
"""


@pytest.mark.parametrize(("body", "code"), [("", 0), ("sys.exit(2)", 2), ("os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_is_the_childs_and_nothing_is_left(tmp_path: Path, body: str, code: int) -> None:
    process = supervised(ORPHANS + f"\n    {body}", tmp_path)
    out, _ = process.communicate(timeout=30)
    rows = [line.split() for line in out.splitlines() if line.split()[0].isdigit()]
    assert process.returncode == code and len(rows) == 3
    for pid, scratch in rows:
        assert not psutil.pid_exists(int(pid))
        assert not Path(scratch).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_child_clean_up(tmp_path: Path, number: int) -> None:
    code = """
        import sys, time
        try:
            print("ready", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            open("cleaned", "w").close()
            sys.exit(130)
    """
    process = supervised(code, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 130 and (tmp_path / "cleaned").exists()


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    code = """
        import signal, time
        signal.signal(signal.SIGINT, lambda *_: print("not yet", flush=True))
        print("ready", flush=True)
        time.sleep(600)
    """
    process = supervised(code, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "not yet\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 137 and time.monotonic() - start < 20


def test_the_child_dies_with_a_killed_supervisor(tmp_path: Path) -> None:
    process = supervised("import os, time; print(os.getpid(), flush=True); time.sleep(600)", tmp_path)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    child.wait(10)
