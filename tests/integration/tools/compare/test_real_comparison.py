"""A recipe's own comparison, as a user makes it: verl's trainer and ours, to the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet
from support.paths import ROOT

pytestmark = [
    *(pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1200)),
    pytest.mark.usefixtures("verl_alone"),
]


def test_a_recipe_is_compared(tmp_path: Path) -> None:
    words = ["arithmetic_grpo", "--arms", "sync,seamless", "--seeds", "1", "--steps", "4", "--skip", "1"]
    command = [sys.executable, "-m", "seamless_verl.cli", "compare", *words, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, f"{done.stderr[-3000:]}{(tmp_path / 'report.md').read_text()}"
    sync, ours = parquet.read_table(tmp_path / "runs.parquet").to_pylist()
    assert (sync["state"], ours["state"]) == ("finished", "finished")
    for run in (sync, ours):  # three steps of 128 samples, whose responses are cut at four tokens
        assert 0.9 * 3 * 128 * 4 < run["tokens"] <= 3 * 128 * 4
    assert sync["staleness_max"] == 0 < ours["staleness_updates"]
    assert 0 < sync["idle"] < 1, "it sleeps between two looks"
    assert 0 <= ours["idle"] < 1, "a process that waits for its core is busy: none idles where others take it"
    for run in (sync, ours):
        assert run["tokens_per_s"] == pytest.approx(run["tokens"] / run["seconds"])
    assert sync["own_idle"] is None and 0 <= ours["own_idle"] <= 1
    samples = parquet.read_table(tmp_path / "lengths.parquet").to_pylist()
    assert {row["arm"] for row in samples} == {"seamless"} and sum(row["trained"] for row in samples) == 4 * 128
    assert {row["tokens"] for row in samples} <= {1, 2, 3, 4} and ours["length_trained"] == 4 * 128
    assert ours["length_drawn"] + 8 * ours["length_unknown"] == 4 * 128 and sync["length_trained"] is None
    commands = [run["command"] for run in json.loads((tmp_path / "manifest.json").read_text())["runs"]]
    assert all("trainer.n_gpus_per_node=1" in words for words in commands), "no arm needs a second device"
    assert "times the tokens/s of sync (one pair)" in done.stdout and (tmp_path / "report.html").stat().st_size > 3e6
