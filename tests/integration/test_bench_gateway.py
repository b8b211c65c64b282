"""The bench of the gateway runs, and what it reports is what happened."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from seamless_verl.bench.gateway import __main__ as bench

pytestmark = pytest.mark.integration


def test_a_short_run_measures_every_arm_and_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    run = ["--no-litellm", "--paces", "at-once", "--rounds", "1", "--seconds", "0.2", "--out", str(out)]
    assert bench.main(run) == 0
    told = json.loads(out.read_text())
    arms = {(row["arm"], row["concurrent"], row["stream"]) for row in told["rows"]}
    assert arms == {(arm, n, stream) for arm in ("direct", "gateway") for n in (1, 32) for stream in (False, True)}
    for row in told["rows"]:
        assert 0 < row["first_p50_ms"] <= row["p50_ms"] <= row["p99_ms"]
        assert row["rate"] > 0 and row["cpu_ms"] > 0
    gateway = [row for row in told["rows"] if row["arm"] == "gateway"]
    assert all(row["added_p50_ms"] > 0 for row in gateway)
    assert told["record"]["tokens"] == 128_000
    assert "gateway" in capfd.readouterr().out
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
