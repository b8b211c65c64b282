"""What quickstart runs a command in: a Ctrl-C ends a script at whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.integration
PROGRESS = ROOT / "scripts" / "lib" / "progress.py"


@pytest.mark.parametrize("ignored", [False, True], ids=["from a terminal", "in the background"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_reaches_what_a_script_has_called(tmp_path: Path, number: int, code: int, ignored: bool) -> None:
    """Also where Ctrl-C is ignored, as it is in what a script has begun with `&`."""
    script = tmp_path / "run.sh"
    script.write_text("echo validation curve; sleep 600; touch went_on")  # which is shown at once, not only logged
    begin = f"import os, signal, sys; signal.signal(signal.SIGINT, signal.{'SIG_IGN' if ignored else 'SIG_DFL'})"
    begin += "; signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # whatever started the tests may have been nohup
    command = [sys.executable, "-c", f"{begin}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"]
    command += [str(PROGRESS), str(tmp_path / "log"), "bash", str(script)]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=env) as one:
        assert one.stdout is not None and one.stdout.readline() == "validation curve\n"
        one.send_signal(number)
        assert one.wait(30) == code
        assert one.stdout.read() == f"\nIt was stopped; all it wrote is in {tmp_path / 'log'}.\n"
    assert not (tmp_path / "went_on").exists()


def test_a_step_is_shown_as_the_trainer_prints_it_or_in_short(tmp_path: Path) -> None:
    """Ours prints one line a step already; verl's modes print every metric."""
    script = tmp_path / "run.sh"
    ours, verls = "step:3 of 80  reward 0.250  887 tokens/s", "step:3 - critic/score/mean:0.25 - timing_s/step:1.9"
    left = "checkpoint: /runs/quickstart/checkpoints/global_step_80"
    lines = [
        f"(SeamlessTaskRunner pid=7) {ours}",
        f"(TaskRunnerV1 pid=7) {verls}",
        f"(SeamlessTaskRunner pid=7) {left}",
    ]
    script.write_text("; ".join(f"echo '{line}'" for line in [*lines, f"Load from {left}"]))
    command = [sys.executable, str(PROGRESS), str(tmp_path / "log"), "bash", str(script)]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.partition(" s  ")[2] for line in shown] == [ours, "step    3  reward 0.250  seconds 1.900", left]


@pytest.mark.parametrize(("code", "kept"), [(2, "the last run's\n"), (3, "no GPU\n"), (0, "no GPU\n")])
def test_what_is_refused_leaves_the_log_of_the_last_run(tmp_path: Path, code: int, kept: str) -> None:
    script, log = tmp_path / "run.sh", tmp_path / "log"
    script.write_text(f"echo no GPU; exit {code}")
    log.write_text("the last run's\n")
    command = [sys.executable, str(PROGRESS), str(log), "bash", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code and ("no GPU" in done.stdout) == (code != 0)
    assert log.read_text() == kept and sorted(path.name for path in tmp_path.iterdir()) == ["log", "run.sh"]


def test_what_nobody_reads_any_more_is_interrupted(tmp_path: Path) -> None:
    """As by `| head`, which leaves after some lines."""
    script = tmp_path / "run.sh"
    script.write_text(
        "trap 'echo interrupted; exit 130' INT; echo validation curve; while :; do echo more; sleep 0.1; done"
    )
    command = [sys.executable, str(PROGRESS), str(tmp_path / "log"), "bash", str(script)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None and one.stdout.readline() == "validation curve\n"
        one.stdout.close()
        assert one.wait(30) == 130
        assert one.stderr is not None and one.stderr.read() == ""
    assert (tmp_path / "log").read_text().splitlines()[-1] == "interrupted"


def test_a_terminal_that_is_closed_interrupts_once(tmp_path: Path) -> None:
    """Writing to it fails then; the run ends in order, and its log is whole."""
    script = tmp_path / "run.sh"
    traps = "trap 'kill -9 $$' HUP; trap 'trap \"kill -9 $$\" INT; sleep 0.5; echo interrupted; exit 130' INT"
    script.write_text(f"{traps}; echo validation curve; while :; do echo more; sleep 0.1; done")
    ours, theirs = os.openpty()
    command = [sys.executable, str(PROGRESS), str(tmp_path / "log"), "bash", str(script)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=theirs, stderr=subprocess.PIPE, text=True) as one:
        os.close(theirs)
        assert os.read(ours, 100).startswith(b"validation curve")
        os.close(ours)
        assert one.wait(30) == 130
        assert one.stderr is not None and one.stderr.read() == ""
    assert (tmp_path / "log").read_text().splitlines()[-1] == "interrupted"


def test_what_nohup_started_goes_on_when_the_terminal_is_closed(tmp_path: Path) -> None:
    (script := tmp_path / "run.sh").write_text("echo validation curve; read line; echo went on")
    command = ["nohup", sys.executable, str(PROGRESS), str(tmp_path / "log"), "bash", str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdin is not None and one.stdout is not None and one.stdout.readline() == "validation curve\n"
        one.send_signal(signal.SIGHUP)
        os.killpg(int(subprocess.check_output(["pgrep", "-P", str(one.pid)])), signal.SIGHUP)
        one.stdin.write("\n")
        one.stdin.close()
        assert one.wait(30) == 0
    assert (tmp_path / "log").read_text() == "validation curve\nwent on\n"


def test_warnings_of_the_checks_are_shown(tmp_path: Path) -> None:
    """Once each; what other modules write is only in the log."""
    ours = "[2026-11-23 10:00:00,000][seamless_verl.main_ppo][WARNING] - data.val_files='x': has long prompts"
    other = "[2026-11-23 10:00:00,000][verl.utils][WARNING] - of verl's own"
    (script := tmp_path / "run.sh").write_text(f"""printf '%s\\n' "{ours}" "{other}" "{ours}" """)
    command = [sys.executable, str(PROGRESS), str(tmp_path / "log"), "bash", str(script)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()
    assert [line.partition(" s  ")[2] for line in shown] == ["warning: data.val_files='x': has long prompts"]
    assert len((tmp_path / "log").read_text().splitlines()) == 3


def test_the_address_of_the_view_is_on_the_screen_and_not_in_the_log(tmp_path: Path) -> None:
    """Its token is all that keeps others out."""
    line, log = "The view of this run: http://127.0.0.1:41/abc/", tmp_path / "log"
    (script := tmp_path / "run.sh").write_text(f"echo '(SeamlessTaskRunner pid=7) {line}' >&2")
    command = [sys.executable, str(PROGRESS), str(log), "bash", str(script)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    assert line in shown
    assert "abc" not in log.read_text() and "The view of this run: " in log.read_text()
