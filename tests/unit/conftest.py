"""What imports torch is marked so: every worker collects all tests, and one alone should pay those seconds."""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuses a module of tests that imports torch; the tests themselves may."""
    before = "torch" in sys.modules
    report = yield
    if "torch" in sys.modules and not before and report.passed:
        report.outcome, report.result = "failed", []
        report.longrepr = f"{collector.nodeid} imports torch when it is collected; let the tests do it that need it"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    before = "torch" in sys.modules
    yield
    if "torch" in sys.modules and not before and item.get_closest_marker("imports_torch") is None:
        pytest.fail("imports torch: mark it with imports_torch", pytrace=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what imports torch: the worker that begins there has run it all before another comes to help."""
    items.sort(key=lambda item: item.get_closest_marker("imports_torch") is None)
