"""Unit tests are of pure code: what starts a process or imports torch belongs to tests/integration, and is refused."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
refusing: set[str] = set()


def refuse(event: str, args: tuple[object, ...]) -> None:
    """An audit hook: it acts before anything is started or imported, whoever would do it."""
    if event in refusing and (event != "import" or str(args[0]).partition(".")[0] == "torch"):
        pytest.fail(f"{event} {args[:1]}: unit tests are of pure code, so this one belongs to tests/integration")


@contextmanager
def refused(node: pytest.Item | pytest.Collector) -> Iterator[None]:
    """While it runs, if it is in this folder; torch only where tests of another kind have not imported it before."""
    if HERE in node.path.parents:
        refusing.update(STARTS | (set() if "torch" in sys.modules else {"import"}))
    try:
        yield
    finally:
        refusing.clear()


sys.addaudithook(refuse)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    with refused(collector):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    with refused(item):
        return (yield)
