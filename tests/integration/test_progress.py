"""What quickstart runs a command in: a Ctrl-C ends a script at whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRESS = Path(__file__).parents[2] / "scripts" / "lib" / "progress.py"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_what_a_script_has_called(tmp_path: Path, number: int, code: int) -> None:
    script = tmp_path / "run.sh"
    script.write_text("echo validation curve; sleep 600; touch went_on")  # which is shown at once, not only logged
    command = [sys.executable, PROGRESS, tmp_path / "log", "bash", script]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=env) as one:
        assert one.stdout is not None and one.stdout.readline() == "validation curve\n"
        one.send_signal(number)
        assert one.wait(30) == code
    assert not (tmp_path / "went_on").exists()
