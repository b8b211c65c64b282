"""A process goes before others for as long as it says, where the system lets it, and is as it was after that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seamless_verl.platform import priority
from seamless_verl.platform.priority import ENABLED

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not ENABLED.exists(), reason="sessions are no autogroups on this kernel"),
]
RAISING = """
from pathlib import Path
Path("/proc/self/autogroup").write_text("-10")
Path("/proc/self/autogroup").write_text("0")
"""
SESSION = """
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from seamless_verl.platform.priority import before_helpers

autogroup = Path("/proc/self/autogroup")
if os.environ["BEFORE"]:
    autogroup.write_text(os.environ["BEFORE"])
if os.environ["NOBODY"]:
    os.setuid(65534)
if os.environ.pop("WITHIN", ""):  # not the session's first process
    sys.exit(subprocess.run([sys.executable, *sys.orig_argv[1:]]).returncode)
niceness = lambda: autogroup.read_text().split()[-1]
said = [niceness()]
with suppress(ZeroDivisionError), before_helpers():
    said.append(niceness())
    1 / 0
print(*said, niceness())
"""


def in_a_session(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    there = os.environ | {"BEFORE": "", "NOBODY": "", "PYTHONPATH": str(Path(__file__).parents[2])} | env
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=there, capture_output=True, text=True, start_new_session=True, timeout=60)


@pytest.mark.parametrize(
    "env", [{}, {"BEFORE": "3"}, {"NOBODY": "1"}, {"WITHIN": "1"}, {"BEFORE": "3", "WITHIN": "1"}], ids=str
)
def test_a_session_goes_first_and_back_again(env: dict[str, str]) -> None:
    may = in_a_session(RAISING).returncode == 0
    if "NOBODY" in env and os.getuid() != 0:
        pytest.skip("only root can become nobody")
    done = in_a_session(SESSION, **env)
    first, within, after = done.stdout.split() or [done.stderr] * 3
    usual = env.get("BEFORE", "0")
    assert (first, after) == (usual, usual)
    on = ENABLED.read_text().strip() == "1"
    assert within == ("-10" if on and may and not {"NOBODY", "WITHIN"} & set(env) else usual)


def test_a_system_that_refuses_after_all_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority, "may_go_first", lambda: True)
    refusing = tmp_path / "autogroup"
    refusing.mkdir()  # a folder takes no text: an OSError, as the kernel's refusal is
    monkeypatch.setattr(priority, "AUTOGROUP", Folder(refusing))
    with priority.before_helpers():
        pass


class Folder:
    """A file that can be read and not written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_text(self) -> str:
        return "/autogroup-1 nice 0\n"

    def write_text(self, text: str) -> int:
        return self.path.write_text(text)
