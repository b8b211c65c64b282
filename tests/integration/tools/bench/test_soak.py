"""The soak from end to end: a real run with agents is watched, stopped, and leaves nothing but its report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.job import small_run
from support.paths import DATA

from seamless_verl.tools.bench.soak import look, main

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.serial]  # a look takes seconds beside others


def test_a_process_and_its_child_are_seen(tmp_path: Path) -> None:
    ballast = "import sys; kept = b'x' * (30 << 20); print(flush=True); sys.stdin.read()"
    before = look(psutil.Process(), {})
    with subprocess.Popen([sys.executable, "-c", ballast], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = look(psutil.Process(), {"here": tmp_path})
        child.communicate()
    key = ("memory", "python")
    assert during[key] - before.get(key, 0.0) >= 30 << 20
    assert during["processes", "python"] - before.get(("processes", "python"), 0.0) == 1


def test_a_run_is_watched_and_stopped(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(DATA))  # where the job's agents are
    out, overrides = tmp_path / "soak", small_run(nano)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    times = ["--minutes", "0.7", "--every", "0.6", "--warm-up", "0.25"]
    code = main([*overrides, *times, "--out", str(out)])
    said = capsys.readouterr()
    assert code in (0, 1), said.err  # half a minute is too short to say what grows
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(rows) > 40 and rows[-1]["steps"] > rows[0]["steps"] >= 1
    for series in ("memory: ray::DataPlane", "descriptors: raylet", "threads: ray::WorkerDict", "disk: journal"):
        assert all(row[series] > 0 for row in rows[1:]), series
        assert series.split(": ")[1] in said.out
    assert "series are flat" in said.out and "ray::DataPlane" in (out / "soak.html").read_text()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_run_that_is_refused_is_shown(nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "soak"
    assert main([*small_run(nano), "seamless.ahead=-3", "--minutes", "1", "--every", "0.5", "--out", str(out)]) == 3
    assert "seamless.ahead=-3" in capsys.readouterr().err
    assert main([*small_run(nano), "--minutes", "1", "--every", "0.5", "--out", str(out)]) == 2, "it is not empty"
