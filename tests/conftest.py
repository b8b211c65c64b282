"""Fixtures shared by all tests; models are made once for a whole test session."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from seamless_verl.scratch import SESSION, scratch_folder


@pytest.fixture(scope="session", autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """TMPDIR of everything the tests start, gone with the session; not pytest's, whose path is too long for sockets."""
    tmp_path_factory.getbasetemp()  # stays where it is, for whoever looks into it afterwards
    with scratch_folder(SESSION) as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(path))
        patch.setattr(tempfile, "tempdir", None)
        yield path


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the nano model (`model/`) and the arithmetic task (`train.parquet`, `val.parquet`)."""
    from seamless_verl.tiny import make_arithmetic, make_model

    folder = tmp_path_factory.mktemp("nano")
    make_model("nano", 0, folder / "model")
    make_arithmetic(folder, 0, 256, 64)
    return folder
