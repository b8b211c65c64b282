"""Runs one command to its end, or to the time that it has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seamless_verl.tools.compare.processes import RunFailedError
from seamless_verl.tools.compare.running import run_logged

pytestmark = pytest.mark.integration


def test_a_run_that_takes_too_long_is_told_from_one_that_failed(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"^ended at the timeout of 0.1 s, 0 of 3 steps"):
        run_logged(["sleep", "60"], tmp_path, os.environ, steps=3, timeout_s=0.1, group=True)
    with pytest.raises(RunFailedError, match=r"^code 1, 0 of 3 steps"):
        run_logged(["false"], tmp_path, os.environ, steps=3, timeout_s=60.0)
