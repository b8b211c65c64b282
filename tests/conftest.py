"""Fixtures shared by all tests; models are made once for a whole test session."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support.parts import files_of, part

from seamless_verl.runtime.scratch import RAY_SOCKETS, scratch_folder

# how long an example takes is the machine's, not the test's
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--part K/N`: every Nth file of those that are collected, beginning with the Kth."""
    parser.addoption("--part", type=part, default=(1, 1), metavar="K/N", help="every Nth file, beginning with the Kth")


@pytest.hookimpl(trylast=True)  # after `-m` has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other parts' files, and run the slowest files first: with two workers, neither is left with a long
    file when the other has finished."""
    files = files_of({item.path for item in items}, *config.getoption("--part"))
    config.hook.pytest_deselected(items=[item for item in items if item.path not in files])
    items[:] = sorted((item for item in items if item.path in files), key=place_of)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure at once: of a session that is stopped, or has no end, pytest prints none."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        sys.stderr.write(f"\n{report.nodeid}, {report.when}: failed, {report.duration:.0f} s\n{report.longreprtext}\n")


def place_of(item: pytest.Item) -> float:
    """The place that the file's `slowest` marker gives it; files without one come last."""
    marker = item.get_closest_marker("slowest")
    return math.inf if marker is None else marker.args[0]


@pytest.fixture(scope="session", autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """TMPDIR of all that the tests start, removed after the session; pytest's own path is too long for sockets."""
    tmp_path_factory.getbasetemp()  # before TMPDIR changes, so that it is kept for a look after a failure
    with scratch_folder(RAY_SOCKETS) as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(path))
        patch.setattr(tempfile, "tempdir", None)
        yield path


@pytest.fixture(scope="module")
def verl_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No other file runs verl's own modes meanwhile: their sockets in /tmp have the Ray job's id for a name, which is
    the first in each cluster, so that two runs on one machine take each other's weights and hang."""
    with (tmp_path_factory.getbasetemp().parent / "verl.lock").open("w") as lock:  # the workers' folders are beside it
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Capture warnings also after an import of vLLM's API server, which sets the root logger and its handlers of that
    moment to errors only."""
    with caplog.at_level(logging.WARNING, logger="seamless_verl"):
        yield


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the nano model (`model/`) and the arithmetic task (`train.parquet`, `val.parquet`)."""
    return made_task("nano", tmp_path_factory)


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`nano` with a mixture of experts."""
    return made_task("moe", tmp_path_factory)


def made_task(size: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from seamless_verl.tiny import make_arithmetic, make_model

    folder = tmp_path_factory.mktemp(size)
    make_model(size, 0, folder / "model")
    make_arithmetic(folder, 0, 256, 64)
    return folder
