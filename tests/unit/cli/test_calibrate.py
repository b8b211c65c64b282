"""`seamless-verl calibrate`: what it prints and writes, and what it refuses with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seamless_verl.cli.main import main
from seamless_verl.simulator.calibration import read_calibration
from seamless_verl.simulator.machine import TWO_CORES

METRICS = {
    "perf/total_num_tokens": 4800,
    "prompt_length/mean": 10,
    "response_length/mean": 65,
    "response_length/max": 180,
    "timing_s/step": 3.0,
    "timing_s/gen": 1.0,
    "timing_s/update_actor": 1.5,
    "timing_s/update_weights": 0.1,
    "lending/switch_s": 0.03,
    "seamless/commit/standstill_max_s": 0.02,
    "seamless/device/train_s": 3.0,
    "seamless/device/rollout_s": 2.0,
    "seamless/device/idle_share": 0.1,
    "seamless/device/train-0/rollout_share": 0.5,
    "seamless/device/train-1/rollout_share": 0.5,
}


def write_steps(folder: Path, steps: int) -> None:
    rows = ({"step": n, "time": 1e9 + n, "metrics": {**METRICS, "calls/tokens": 4160 * n}} for n in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_it_prints_constants_with_residuals_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path, 9)
    assert main(["calibrate", str(tmp_path), "--samples", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fitted to 7 steps after the first 2, of 2 devices"
    assert ["train_token_s", "0.000625", "0%"] in [line.split()[:3] for line in lines]
    found = read_calibration(tmp_path / "calibration.json")
    assert (found.steps, found.workload.prompts, found.seats) == (7, 16, 32)
    assert main(["calibrate", str(tmp_path), "--samples", "4", "--json", "--out", str(tmp_path / "c")]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "c").read_text())


def test_on_shared_cores_the_hosts_work_is_assumed_as_on_two_cores(tmp_path: Path) -> None:
    write_steps(tmp_path, 9)
    assert main(["calibrate", str(tmp_path), "--samples", "4", "--shared-cores"]) == 0
    machine = read_calibration(tmp_path / "calibration.json").machine
    assert machine.host_shares and machine.host_token_s == TWO_CORES.host_token_s


def test_mistakes_are_one_line_and_leave_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path, 4)
    for arguments, message in (
        ([str(tmp_path)], "2 steps after the first 2 are too few"),
        ([str(tmp_path / "x")], "RUN="),
        ([str(tmp_path), "--skip", "-1"], "--skip=-1"),
        ([str(tmp_path), "--samples", "0"], "--samples=0"),
        ([str(tmp_path), "--rates", str(tmp_path / "none")], "too few"),
    ):
        assert main(["calibrate", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
