"""The scale bench from end to end: two shards in processes of their own, agents that come and go, nothing left."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from seamless_verl.tools.bench.scale import main

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_two_shards_serve_all_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    sizes = ["--sessions", "12", "--shards", "2", "--replicas", "2", "--tokens", "32", "--tool-s", "0.5"]
    assert main([*sizes, "--turns", "2", "--seconds", "4", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert row["tokens"] == 32 * row["calls"] and row["calls"] >= 12
    assert row["cpu_s"] > 0 and row["agents_cpu_s"] > 0 and row["grown_bytes"] > 0 and row["late_s"] > 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["2", "12"]
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
