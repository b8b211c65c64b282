"""Fails each unit test that starts a process or imports torch: unit tests are of pure code."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

UNIT_TESTS = Path(__file__).parent
PROCESS_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
refused_events: set[str] = set()  # names of audit events, while a unit test runs


def fail_on_refused_event(event: str, args: tuple[object, ...]) -> None:
    """An audit hook: it is called before anything is started or imported, by whatever code."""
    if event in refused_events and (event != "import" or str(args[0]).partition(".")[0] == "torch"):
        pytest.fail(f"{event} {args[:1]}: unit tests are of pure code, so this one belongs to tests/integration")


@contextmanager
def pure_code_only(node: pytest.Item | pytest.Collector) -> Iterator[None]:
    """Refuse these events if the node is a unit test; torch only if other tests have not imported it before."""
    if UNIT_TESTS in node.path.parents:
        refused_events.update(PROCESS_STARTS | (set() if "torch" in sys.modules else {"import"}))
    try:
        yield
    finally:
        refused_events.clear()


sys.addaudithook(fail_on_refused_event)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    with pure_code_only(collector):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    with pure_code_only(item):
        return (yield)
