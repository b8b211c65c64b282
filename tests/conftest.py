"""Fixtures shared by all tests; models are made once for a whole test session."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the nano model (`model/`) and the arithmetic task (`train.parquet`, `val.parquet`)."""
    from seamless_verl.tiny import make_arithmetic, make_model

    folder = tmp_path_factory.mktemp("nano")
    make_model("nano", 0, folder / "model")
    make_arithmetic(folder, 0, 256, 64)
    return folder
