"""The supervisor: its child's exit code, its signals, and every process the child ever started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

RUN = """
import signal, sys
from seamless_verl.runtime import supervisor
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also when the tests themselves run under nohup
{before}
def on_exit(run_file):
    print("run file", run_file.read_text() if run_file.exists() else "none", flush=True)
sys.exit(supervisor.supervise([sys.executable, "-c", sys.argv[1]], run_file_variable="M", on_exit=on_exit))
"""


@pytest.fixture
def tmp_path() -> Path:
    """Short, since it is TMPDIR here, where Ray's sockets are."""
    return Path(tempfile.mkdtemp(prefix="t"))


def supervised(code: str, cwd: Path, *, before: str = "", **env: str) -> subprocess.Popen[str]:
    """The supervisor of a child that runs `code`; `before` runs first, in the supervisor."""
    command = [sys.executable, "-c", RUN.format(before=textwrap.dedent(before)), textwrap.dedent(code)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    everything = inherited | {"TMPDIR": str(cwd)} | env
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=everything,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


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
    rows = [words for words in map(str.split, out.splitlines()) if words[0].isdigit()]
    assert process.returncode == code and len(rows) == 3
    for pid, scratch in rows:
        assert not psutil.pid_exists(int(pid))
        assert Path(scratch).parent == tmp_path
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_child_clean_up(tmp_path: Path, number: int) -> None:
    code = """
        import os, sys, time
        try:
            print(os.environ["RAY_TMPDIR"], flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            open("cleaned", "w").close()
            sys.exit(130)
    """
    process = supervised(code, tmp_path)
    scratch = Path(line(process))
    assert scratch.is_dir()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 130 and os.listdir(tmp_path) == ["cleaned"]


def test_a_run_under_nohup_hears_no_hangup(tmp_path: Path) -> None:
    code = """
        import os, time
        print("ready", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.02)
    """
    process = supervised(code, tmp_path, before="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    assert line(process) == "ready"
    process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_kills_at_once_and_ends_as_the_first(tmp_path: Path, second: int) -> None:
    code = """
        import os, signal, subprocess, sys, time
        logs = os.path.join(os.environ["RAY_TMPDIR"], "ray", "session_2030", "logs")
        os.makedirs(logs)
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print(left.pid, flush=True)
        signal.signal(signal.SIGINT, lambda *_: os.write(1, b"not yet\\n"))  # not into a print
        print("ready", flush=True)
        while True:
            time.sleep(600)
    """
    process = supervised(code, tmp_path)
    left = int(line(process))
    assert line(process) == "ready"
    process.send_signal(signal.SIGINT)
    assert line(process) == "not yet"
    start = time.monotonic()
    process.send_signal(second)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and time.monotonic() - start < 5
    assert out == "run file none\n", "and nothing of a failure"
    assert not psutil.pid_exists(left) and not os.listdir(tmp_path)


def test_a_child_that_outstays_its_grace_has_failed(tmp_path: Path) -> None:
    code = """
        import os, signal, time
        signal.signal(signal.SIGINT, lambda *_: os.write(1, b"not yet\\n"))  # not into a print
        print("ready", flush=True)
        while True:
            time.sleep(600)
    """
    process = supervised(code, tmp_path, before="supervisor.GRACE_S = 0.2")
    assert line(process) == "ready"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 137


@pytest.mark.parametrize(("how", "code"), [("sys.exit(0)", 0), ("sys.exit(1)", 1), ("os.kill(os.getpid(), 9)", 137)])
def test_what_the_child_wrote_is_read_when_all_its_processes_are_gone(tmp_path: Path, how: str, code: int) -> None:
    child = f"""
        import os, subprocess, sys
        open(os.environ["M"], "w").write("of the child")
        late = "import signal, sys, time; signal.signal(15, lambda *_: print('late', flush=True) or sys.exit());"
        late += "open('up', 'w').close(); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", late])
        while not os.path.exists("up"):
            pass
        {how}
    """
    process = supervised(child, tmp_path)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == code and out.splitlines() == ["late", "run file of the child"]


def test_a_process_that_cannot_be_killed_is_named_and_ends_nothing_but_the_waiting(tmp_path: Path) -> None:
    """As one in an uninterruptible wait, which a test cannot bring about: here the kill is not sent."""
    unkillable = """
        import psutil
        supervisor.SWEEP_S = 0.2
        psutil.Process.terminate = psutil.Process.kill = lambda self: None
    """
    code = """
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
    """
    process = supervised(code, tmp_path, before=unkillable)
    pid = int(line(process))
    try:
        out = line(process)
        assert f"Process {pid} does not end" in out
        assert process.wait(10) == 0
    finally:
        os.kill(pid, signal.SIGKILL)  # it holds the output open
    assert process.stdout is not None and "run file" not in process.stdout.read()


def test_a_process_of_others_is_left_alone(tmp_path: Path) -> None:
    """A cluster that was there before, as this run's own processes are many."""
    code = "import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as other:
        process = supervised(ORPHANS, tmp_path)
        process.communicate(timeout=30)
        assert other.poll() is None
        other.kill()


def test_everything_temporary_of_the_child_is_in_the_scratch_folder(tmp_path: Path) -> None:
    code = "import os, tempfile; print(tempfile.mkdtemp(), os.environ['RAY_TMPDIR'], flush=True)"
    process = supervised(code, tmp_path)
    made, scratch = map(Path, line(process).split())
    assert made.parent == scratch != tmp_path == scratch.parent
    assert process.wait(30) == 0


def test_rays_session_alone_is_elsewhere_when_its_sockets_have_no_room(tmp_path: Path) -> None:
    (long := tmp_path / "long-for-rays").mkdir()
    (system := tmp_path / "system").mkdir()
    shorter = (
        f"from pathlib import Path; from seamless_verl.runtime import scratch; scratch.FALLBACK = Path({str(system)!r})"
    )
    code = "import os; print(os.environ['TMPDIR'], os.environ['RAY_TMPDIR'], flush=True)" + textwrap.dedent(LOGS)
    process = supervised(code, tmp_path, before=shorter, TMPDIR=str(long))
    out, _ = process.communicate(timeout=30)
    message, folders, *_ = out.splitlines()
    assert f"TMPDIR={str(long)!r}: too long" in message and f"Ray's session is in {system}." in message
    assert [Path(folder).parent for folder in folders.split()] == [long, system]
    assert not os.listdir(long) and not os.listdir(system)
    assert (tmp_path / "outputs" / f"ray-logs-{process.pid}" / "raylet.out").is_file(), "also from there"
    process = supervised("import os; print(os.environ['RAY_TMPDIR'])", tmp_path, TMPDIR=str(long), RAY_TMPDIR="/mine")
    assert process.communicate(timeout=30)[0].startswith("/mine\n"), "there is no message about the user's own"


def test_what_a_killed_supervisor_left_goes_with_the_next_run(tmp_path: Path) -> None:
    code = "import tempfile, time; print(tempfile.mkdtemp(), flush=True); time.sleep(600)"
    other, killed = supervised(code, tmp_path), supervised(code, tmp_path)
    held, left = Path(line(other)).parent, Path(line(killed)).parent
    killed.kill()
    killed.communicate()
    assert set(tmp_path.iterdir()) == {held, left}
    assert supervised("", tmp_path).wait(30) == 0
    assert list(tmp_path.iterdir()) == [held], "that of a living run stays"
    other.send_signal(signal.SIGTERM)
    other.communicate(timeout=30)
    assert not os.listdir(tmp_path)


def session(tmp_path: Path, *, before: str = "ignore = False", **env: str) -> str:
    """RAY_TMPDIR as the supervisor gives it to its child; "own" for one of the run's own."""
    call = "print(supervisor.existing_ray_folder(os.environ, ignore_local_cluster=ignore) or 'own'); sys.exit()"
    process = supervised("", tmp_path, before=f"import os\n{before}\n{call}", **env)
    out, _ = process.communicate(timeout=30)
    return out.strip()


def test_a_cluster_that_can_be_joined_is_not_hidden(tmp_path: Path) -> None:
    rays_own = str(tmp_path)
    assert session(tmp_path) == "own"
    assert session(tmp_path, RAY_ADDRESS="") == "own"
    assert session(tmp_path, RAY_ADDRESS="local") == "own"
    assert session(tmp_path, RAY_ADDRESS="10.0.0.1:6379") == rays_own
    assert session(tmp_path, RAY_TMPDIR="/the/users") == "/the/users"
    (tmp_path / "ray").mkdir()
    address = tmp_path / "ray" / "ray_current_cluster"
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address.write_text(f"127.0.0.1:{cluster.getsockname()[1]}")
        assert session(tmp_path) == rays_own
        assert session(tmp_path, before="ignore = True") == "own"
    assert session(tmp_path) == "own"  # it has crashed, and its file stays
    address.write_text("nonsense")
    assert session(tmp_path) == "own"


LOGS = """
    import os, sys
    logs = os.path.join(os.environ["RAY_TMPDIR"], "ray", "session_2030", "logs")
    os.makedirs(logs)
    open(os.path.join(logs, "raylet.out"), "w").write("why")
    sys.exit(3)
"""


def test_the_logs_of_a_failed_run_are_kept(tmp_path: Path) -> None:
    process = supervised(LOGS, tmp_path)
    out, _ = process.communicate(timeout=30)
    kept = tmp_path / "outputs" / f"ray-logs-{process.pid}"
    assert process.returncode == 3 and (kept / "raylet.out").read_text() == "why"
    assert str(kept.relative_to(tmp_path)) in out


def test_the_logs_of_a_failed_run_are_kept_where_it_wants_them(tmp_path: Path) -> None:
    wanted = tmp_path / "run folder"
    choose = f"""
        from pathlib import Path
        from seamless_verl.runtime.supervisor import set_log_folder
        import os
        set_log_folder(Path({wanted.name!r}), Path(os.environ["M"]))
    """
    process = supervised(textwrap.dedent(choose) + textwrap.dedent(LOGS), tmp_path)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 3 and str(wanted / f"ray-logs-{process.pid}") in out
    assert (wanted / f"ray-logs-{process.pid}" / "raylet.out").is_file() and os.listdir(tmp_path) == [wanted.name]


def test_logs_that_cannot_be_kept_where_the_run_wants_them_are_among_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "outputs").touch()  # no folder can be made here, by root neither
    process = supervised(LOGS, tmp_path)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 3 and "Traceback" not in out
    assert f"outputs/ray-logs-{process.pid}, but: " in out
    kept = tmp_path / f"ray-logs-{process.pid}"
    assert out.splitlines()[-1].endswith(f"Ray's logs are in {kept}") and (kept / "raylet.out").read_text() == "why"


@pytest.mark.parametrize("console", ["read", "closed"])
def test_a_clean_up_that_fails_ends_nothing_but_itself(tmp_path: Path, console: str) -> None:
    """As one of a file in a folder that has become read-only."""
    ending = """
        from pathlib import Path
        from seamless_verl.runtime.console import last_screen
        def fails(run_file):
            raise OSError(30, "Read-only file system", "admin.json")
        def at_last(run_file):
            Path("screen").write_text("\\n".join(last_screen(run_file)))
        run = supervisor.supervise
        supervisor.supervise = lambda *args, **options: run(*args, **options | {"on_exit": fails, "on_end": at_last})
    """
    code = f"""{LOGS.replace("sys.exit(3)", "print('begun', flush=True); sys.stdin.read(); os.kill(os.getpid(), 9)")}"""
    process = supervised(code, tmp_path, before=ending)
    assert process.stdout is not None and process.stdin is not None
    first = line(process)
    assert first == "begun", first + process.stdout.read()
    if console == "closed":
        process.stdout.close()
    process.stdin.close()
    out = "" if console == "closed" else process.stdout.read()
    assert process.wait(30) == 137
    assert console == "closed" or "A part of the clean-up failed: OSError: [Errno 30] Read-only file system" in out
    assert (tmp_path / "outputs" / f"ray-logs-{process.pid}" / "raylet.out").is_file()
    assert "was ended by SIGKILL" in (tmp_path / "screen").read_text()
    assert sorted(os.listdir(tmp_path)) == ["outputs", "screen"]


def test_the_child_dies_with_a_killed_supervisor(tmp_path: Path) -> None:
    process = supervised("import os, time; print(os.getpid(), flush=True); time.sleep(600)", tmp_path)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    child.wait(10)
