"""An engine that is measured alone has a limit of time, and is gone after it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from seamless_verl.tools.compare.engine_baseline import measure_rates
from seamless_verl.tools.compare.workloads import WORKLOADS

pytestmark = pytest.mark.integration


def test_a_measurement_that_takes_too_long_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure_rates(WORKLOADS["w1"], tmp_path, 0.3)
    errors = capsys.readouterr().err
    assert "--timeout 0.3" in errors and str(tmp_path / "rates.txt") in errors
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in (p.info["cmdline"] or ())]
