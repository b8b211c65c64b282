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


class Said:
    """A session's file that says one thing, and refuses from the `taken`-th text on."""

    def __init__(self, said: str, taken: int) -> None:
        self.said, self.taken = said, taken
        self.written = list[str]()

    def read_text(self) -> str:
        return self.said

    def write_text(self, text: str) -> None:
        if len(self.written) == self.taken:
            raise PermissionError("no")
        self.written.append(text)


@pytest.mark.parametrize(
    ("said", "taken", "written"),
    [
        ("/autogroup-1 nice 4\n", 9, ["-10", "4"]),
        ("/autogroup-1 nice 4\n", 0, []),
        ("/autogroup-1 nice 4\n", 1, ["-10"]),
        ("", 9, []),
    ],
)
def test_what_cannot_be_lowered_again_is_not_raised_and_a_refusal_is_no_error(
    said: str, taken: int, written: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = Said(said, taken)
    monkeypatch.setattr(priority, "may_go_first", lambda: True)
    monkeypatch.setattr(priority, "AUTOGROUP", file)
    with priority.before_helpers():
        pass
    assert file.written == written
    assert ("stays before others" in caplog.text) is (taken == 1)
