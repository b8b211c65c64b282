"""What quickstart runs a command in: a Ctrl-C ends a script at whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
PROGRESS = Path(__file__).parents[2] / "scripts" / "lib" / "progress.py"


@pytest.mark.parametrize("ignored", [False, True], ids=["from a terminal", "in the background"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_what_a_script_has_called(tmp_path: Path, number: int, code: int, ignored: bool) -> None:
    """Also where Ctrl-C is ignored, as it is in what a script has begun with `&`."""
    script = tmp_path / "run.sh"
    script.write_text("echo validation curve; sleep 600; touch went_on")  # which is shown at once, not only logged
    begin = f"import os, signal, sys; signal.signal(signal.SIGINT, signal.{'SIG_IGN' if ignored else 'SIG_DFL'})"
    command = [sys.executable, "-c", f"{begin}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"]
    command += [str(PROGRESS), str(tmp_path / "log"), "bash", str(script)]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=env) as one:
        assert one.stdout is not None and one.stdout.readline() == "validation curve\n"
        one.send_signal(number)
        assert one.wait(30) == code
    assert not (tmp_path / "went_on").exists()
