"""The bench of the gateway runs, and what it reports is what happened."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from seamless_verl.tools.bench import gateway as bench
from seamless_verl.tools.bench.load import PACINGS, shapes

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.serial, pytest.mark.slowest(8)]


def test_a_short_run_measures_every_arm_and_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert bench.main(["--no-litellm", "--rounds", "1", "--seconds", "0.2", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    arms = {
        (row["arm"], row["pacing"]["name"], row["concurrent"], row["callers"], row["stream"]) for row in report["rows"]
    }
    assert arms == {
        (arm, pacing.name, shape.concurrent, shape.callers, shape.stream)
        for arm in ("direct", "gateway")
        for pacing in PACINGS.values()
        for shape in shapes(pacing)
    }
    for row in report["rows"]:
        assert 0 < row["first_p50_ms"] <= row["p50_ms"] <= row["p99_ms"]
        assert row["first_p50_ms"] <= row["first_p99_ms"] <= row["p99_ms"]
        assert row["rate"] > 0
        assert (
            row["cpu_ms"] > 0 or row["pacing"]["name"] == "steady"
        )  # few calls: less than the clock of a process tells
    at_once = [row for row in report["rows"] if row["arm"] == "gateway" and row["pacing"]["name"] == "at-once"]
    assert all(row["added_p50_ms"] > 0 for row in at_once)
    assert "gateway" in capfd.readouterr().out
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
