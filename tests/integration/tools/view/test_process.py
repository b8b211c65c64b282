"""The view beside a run: started and ended with it, and no harm to it whatever becomes of the view."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from support.view import make_run

from seamless_verl.run_folder import viewing

pytestmark = pytest.mark.integration
LIMIT_S = 60.0
ADDRESS = "The view of this run: "


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="seamless_verl")


def logged(caplog: pytest.LogCaptureFixture, text: str) -> str:
    """The message with this text, when the log has it."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if found := [message for message in caplog.messages if text in message]:
            return found[0]
        time.sleep(0.02)
    raise AssertionError(f"{text!r} is not in {caplog.messages}")


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """The address, when it is on standard error."""
    deadline, text = time.monotonic() + LIMIT_S, ""
    while time.monotonic() < deadline:
        text += capsys.readouterr().err
        if found := re.findall(rf"{ADDRESS}(http\S+)\n", text):
            return str(found[0])
        time.sleep(0.02)
    raise AssertionError(f"no address in {text!r}")


def views() -> list[psutil.Process]:
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie, which other tests may leave, has no command line
            found += [one] if "seamless_verl.tools.view" in one.cmdline() else []
    return found


def test_it_serves_as_long_as_the_block_and_prints_its_address_once_and_into_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with viewing(make_run(tmp_path), "127.0.0.1", 0):
        address = printed(capsys)
        assert httpx.get(f"{address}api/run", timeout=30).json()["step"] == 2
        (process,) = views()
        assert process.nice() == psutil.Process().nice() + 10, "a run comes first"
    assert not process.is_running() and views() == []
    assert caplog.messages == [] and capsys.readouterr().err == ""
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)


def test_a_port_that_is_taken_only_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with viewing(tmp_path, "127.0.0.1", port):
            message = logged(caplog, "the run goes on without")
    assert f"--port={port}: cannot be listened to" in message and "0 for any that is free" in message
    assert views() == []


def test_its_death_only_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with viewing(make_run(tmp_path), "127.0.0.1", 0):
        printed(capsys)
        views()[0].kill()
        logged(caplog, "The view has ended, and the run goes on without: -9")


def test_a_process_that_cannot_start_only_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with viewing(tmp_path, "127.0.0.1", 0):
        logged(caplog, "The view does not start, and the run goes on without")


def test_one_that_does_not_end_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with viewing(make_run(tmp_path), "127.0.0.1", 0):
        printed(capsys)
        (process,) = views()
        process.suspend()
    assert not process.is_running()


def test_it_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from seamless_verl.run_folder import viewing
with viewing(Path({str(make_run(tmp_path))!r}), "127.0.0.1", 0):
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None and ADDRESS in run.stderr.readline()
        (view,) = psutil.Process(run.pid).children()
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    psutil.wait_procs([view], timeout=LIMIT_S)
    assert not view.is_running()
