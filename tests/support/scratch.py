"""A folder of the test's own in which scratch folders are made."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An own TMPDIR, short enough.

    The test's own changes of `tempfile.tempdir` are undone with these, in reverse: undone after them, they would leave
    this folder, which is gone, to later tests.
    """
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)
