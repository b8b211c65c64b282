"""Unit tests are of pure code: what starts a process or imports torch belongs to tests/integration, and is refused."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
refusing: set[str] = set()


def refuse(event: str, args: tuple[object, ...]) -> None:
    """An audit hook: it acts before anything is started or imported, whoever would do it."""
    if event in refusing and (event != "import" or str(args[0]).partition(".")[0] == "torch"):
        pytest.fail(f"{event} {args[:1]}: unit tests are of pure code, so this one belongs to tests/integration")


@contextmanager
def refused() -> Iterator[None]:
    """Torch only where it has not been imported before, by tests of another kind in the same process."""
    refusing.update(STARTS | (set() if "torch" in sys.modules else {"import"}))
    try:
        yield
    finally:
        refusing.clear()


sys.addaudithook(refuse)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    with refused():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, bool | None, bool | None]:
    with refused():
        return (yield)
