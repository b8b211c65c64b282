"""An engine that is measured alone has a limit of time, and is gone after it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil
import pytest

from seamless_verl.tools.compare.engine_baseline import measure_rates, measured_rates
from seamless_verl.tools.compare.workloads import WORKLOADS, make_data

pytestmark = pytest.mark.integration


def test_a_measurement_that_takes_too_long_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure_rates(WORKLOADS["w1"], tmp_path, 0.3)
    errors = capsys.readouterr().err
    assert "--timeout 0.3" in errors and str(tmp_path / "rates.txt") in errors
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in (p.info["cmdline"] or ())]


def test_a_measurement_leaves_nothing_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = WORKLOADS["w1"]
    make_data(workload, 1, tmp_path)
    with tempfile.TemporaryDirectory(prefix="t") as temporary:  # short, for sockets
        monkeypatch.setenv("TMPDIR", temporary)
        monkeypatch.setattr(tempfile, "tempdir", None)  # it is read again
        rates = measured_rates(workload, tmp_path, 300)
        left = list(Path(temporary).iterdir())
    assert set(rates) == {workload.in_flight, workload.seats} and min(rates.values()) > 0
    assert left == []
