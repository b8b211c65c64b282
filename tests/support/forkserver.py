"""A forkserver of a test's own, and processes launched through it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from seamless_verl.platform.forkserver import launcher
from support.processes import has_ended


@pytest.fixture
def forkserver(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a launcher whose forkserver has imported `colorsys` and belongs to a process of its own."""
    with forkserver_with("colorsys", tmp_path) as environ:
        yield environ


@contextmanager
def forkserver_with(module: str, tmp_path: Path, import_s: float = 120, *, after: str = "") -> Iterator[dict[str, str]]:
    """`import_s` bounds the import of the module, and of the one that is imported before it."""
    owner = subprocess.Popen(["sleep", "1000"])
    environ = {**os.environ, launcher.ADDRESS: f"forkserver-test-{os.getpid()}-{tmp_path.name}", "MINE": "yes"}
    assert launcher.start_forkserver(launcher.socket_address(environ), owner.pid, [*after.split(), module])
    assert not launcher.start_forkserver(launcher.socket_address(environ), owner.pid), "there is one already"
    imported = script(tmp_path, f"import sys; sys.exit({module!r} in sys.modules)")
    assert launch(environ, imported).wait(import_s) == 1, "it was forked before the imports were over"
    yield environ
    owner.kill()
    owner.wait()
    psutil.wait_procs(forkservers(), timeout=60)
    assert forkservers() == []


def forkservers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [p for p in children if not has_ended(p.pid) and is_forkserver(p)]


def is_forkserver(process: psutil.Process) -> bool:
    """Whether it is one, or was started so lately that the kernel has yet to give it its command line."""
    try:
        line = process.cmdline()
        return "server.py" in str(line) or (not line and os.getsid(process.pid) == process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError):  # it has ended since it was listed
        return False


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return str(folder / "script.py")


def launching(*arguments: str) -> list[str]:
    return [sys.executable, "-IS", launcher.__file__, *arguments]


def launch(environ: dict[str, str], *arguments: str, **options: object) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(launching(*arguments), env=environ, **(pipes | options))  # type: ignore[call-overload,no-any-return]
