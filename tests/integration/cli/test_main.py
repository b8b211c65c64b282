"""seamless-verl as a process of its own: its output, its exit codes, and readers that close the pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import journal_file
from support.journal import open_journal, session_opened, write

pytestmark = pytest.mark.integration
COMMAND = [sys.executable, "-m", "seamless_verl.cli"]


def test_the_command_as_a_process(tmp_path: Path) -> None:
    listed = subprocess.run([*COMMAND, "trajectories", "ls", journal_file(tmp_path)], capture_output=True, text=True)
    assert (listed.returncode, listed.stderr) == (0, "") and "3 sessions" in listed.stdout
    refused = subprocess.run([*COMMAND, "trajectories", "ls", "nowhere"], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("seamless-verl: JOURNAL='nowhere'") and refused.stderr.count("\n") == 1
    helped = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True)
    assert helped.returncode == 0 and "trajectories" in helped.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("sessions", [1, 3000])
def test_a_reader_that_has_left_is_no_error(tmp_path: Path, unbuffered: str, sessions: int) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, *(session_opened(f"session-{number:06}") for number in range(sessions)))
        reading, writing = os.pipe()
        os.close(reading)
        argv = [*COMMAND, "trajectories", "ls", "--json", str(journal.path)]
        env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(argv, stdout=writing, stderr=subprocess.PIPE, text=True, env=env)
        os.close(writing)
    assert (done.stderr, done.returncode) == ("", 141)


def test_a_reader_that_leaves_in_the_middle_is_no_error(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        write(journal, *(session_opened(f"session-{number:06}") for number in range(3000)))
        argv = [*COMMAND, "trajectories", "ls", "--json", str(journal.path)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            assert "session-000000" in process.stdout.readline()
            process.stdout.close()
            assert (process.stderr.read(), process.wait(timeout=60)) == ("", 141)
