"""Lines of a run's processes reach its console by a pipe of the run; a console that takes nothing stops nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.integration
SHOWS = "import sys; from seamless_verl.runtime.console import show_line; [show_line(line) for line in sys.argv[1:]]"
COMMAND = f"""
import subprocess, sys
from seamless_verl.runtime.console import lines_shown, say, show_line
def actor(*lines):
    subprocess.run([sys.executable, "-c", {SHOWS!r}, *lines], stdout=subprocess.DEVNULL, check=True)
with lines_shown():
    actor("step:1 of 3", "step:2 of 3")
    actor(*["x" * 1000] * int(sys.argv[1]))
    actor("step:3 of 3")
    show_line("its own")
show_line("after it")
say("at last")
"""


def started(run_file: Path | str, filling: int = 0, **options: int | None) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "SEAMLESS_RUN_FILE": str(run_file)}
    return subprocess.Popen([sys.executable, "-c", COMMAND, str(filling)], env=env, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_lines_come_in_their_order_and_none_is_lost_at_the_end(tmp_path: Path) -> None:
    process = started(tmp_path / "run.json", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed, _ = process.communicate(timeout=60)
    lines = ["step:1 of 3", "step:2 of 3", "step:3 of 3", "its own", "after it", "at last"]
    assert (process.returncode, printed.splitlines()) == (0, lines)


def test_a_console_that_is_closed_or_full_stops_nobody(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        for number, place in enumerate((writer, full.fileno())):
            (folder := tmp_path / str(number)).mkdir()
            assert started(folder / "run.json", stdout=place, stderr=place).wait(60) == 0
    os.close(writer)


def test_a_console_that_nobody_reads_loses_lines_and_holds_nobody_up(tmp_path: Path) -> None:
    """What it and the pipe hold is less than the 400 kB that are written."""
    process = started(tmp_path / "run.json", 400, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.wait(60) == 0
    printed, _ = process.communicate()
    assert printed.startswith("step:1 of 3\nstep:2 of 3\n") and len(printed) < 400_000
