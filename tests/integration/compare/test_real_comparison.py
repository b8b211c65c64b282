"""A recipe's own comparison, as a user makes it: verl's trainer and ours on two devices, to the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet
from support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1200)]


def test_a_recipe_is_compared_on_two_devices(tmp_path: Path) -> None:
    words = ["arithmetic_grpo", "--arms", "sync,seamless", "--seeds", "1", "--steps", "4", "--skip", "1"]
    command = [sys.executable, "-m", "seamless_verl.cli", "compare", *words, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, f"{done.stderr[-3000:]}{(tmp_path / 'report.md').read_text()}"
    sync, ours = parquet.read_table(tmp_path / "runs.parquet").to_pylist()
    assert (sync["state"], ours["state"]) == ("finished", "finished")
    assert sync["tokens"] == ours["tokens"] == 3 * 128 * 4, "the same samples; responses are cut at four tokens"
    assert sync["staleness_max"] == 0 < ours["staleness_updates"]
    for run in (sync, ours):
        assert 0 < run["idle"] < 1 and run["tokens_per_s"] == pytest.approx(run["tokens"] / run["seconds"])
    assert sync["own_idle"] is None and 0 <= ours["own_idle"] <= 1
    devices = [run["command"] for run in json.loads((tmp_path / "manifest.json").read_text())["runs"]]
    assert all("trainer.n_gpus_per_node=2" in words for words in devices), "a job of one device gets a second one"
    assert "times the tokens/s of sync (one pair)" in done.stdout and (tmp_path / "report.html").stat().st_size > 3e6
