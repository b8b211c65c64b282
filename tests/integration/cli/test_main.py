"""seamless-verl as a process of its own: its output, its exit codes, and readers that close the pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

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


FEW_PACKAGES = """
import sys

ALLOWED = {"seamless_verl", "msgspec", "pydantic", "pydantic_core", "annotated_types", "typing_inspection"}
ALLOWED |= {"httpx", "httpcore", "h11", "anyio", "idna", "certifi", "sniffio", "typing_extensions"}


class Missing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        own = top in sys.stdlib_module_names or top.startswith("_sysconfigdata_")  # which has the platform in its name
        if top not in ALLOWED and not own:
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)


sys.meta_path.insert(0, Missing())
from seamless_verl.cli.main import main

sys.exit(main(sys.argv[1:]))
"""


class Refusing(BaseHTTPRequestHandler):
    """A run that refuses its runners' key."""

    def do_POST(self) -> None:
        content = b'{"error": {"code": "invalid_api_key", "message": "This is not the runner key"}}'
        self.send_response(401)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def refusing_run() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_runner_needs_httpx_msgspec_and_pydantic_alone(tmp_path: Path) -> None:
    """With what these three need; docs/runners.md says so of the machines of runners."""
    agent = tmp_path / "agent.py"
    agent.write_text("def run(task, endpoint):\n    return 1.0\n")
    environment = os.environ | {"SEAMLESS_RUNNER_KEY": "mine"}
    command = [sys.executable, "-c", FEW_PACKAGES]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert helped.returncode == 0 and "trajectories" in helped.stdout, helped.stderr
    with refusing_run() as url:
        options = ["--connect", url, "--agent", f"a={agent}:run", "--command", "b=true"]
        done = subprocess.run([*command, "runner", *options], capture_output=True, text=True, env=environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == "seamless-verl: 401 invalid_api_key: This is not the runner key"
