"""A process ends with the one that it is of no use without, however that one ends."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from seamless_verl.runtime.process import end_with_process

pytestmark = pytest.mark.integration
DEPENDENT = """
import signal, sys
from seamless_verl.runtime.process import end_with_process
end_with_process(int(sys.argv[1]))
print("watches", flush=True)
signal.pause()
"""


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_the_other_process_is_killed(how: int) -> None:
    with running("sleep", "600") as other, running(sys.executable, "-c", DEPENDENT, str(other.pid)) as dependent:
        assert dependent.stdout is not None and dependent.stdout.readline() == "watches\n"
        assert dependent.poll() is None
        other.send_signal(how)
        assert dependent.wait(60) == 1


def test_it_goes_on_where_the_system_has_no_handles_of_processes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(pid: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refused)
    end_with_process(os.getpid())
    assert "pidfd_open" in caplog.text and str(os.getpid()) in caplog.text


def test_it_ends_at_once_where_the_other_process_has_ended() -> None:
    with subprocess.Popen(["true"]) as other:
        other.wait()
    with running(sys.executable, "-c", DEPENDENT, str(other.pid)) as dependent:
        assert dependent.wait(60) == 1
