"""`seamless-verl calibrate`: what it prints and writes, and what it refuses with exit code 2."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from seamless_verl.cli.main import main
from seamless_verl.errors import ConfigError
from seamless_verl.runtime.files import RunDescription
from seamless_verl.tools.simulator.calibrate_command import run_of
from seamless_verl.tools.simulator.calibration import read_calibration
from seamless_verl.tools.simulator.machine import TWO_CORES

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


def write_steps(folder: Path, steps: int, rollout_s: Sequence[float] = (2.0,)) -> None:
    """The seconds of generation of the steps are taken in turn."""
    lines = []
    for step in range(1, steps + 1):
        own = {"calls/tokens": 4160 * step, "seamless/device/rollout_s": rollout_s[step % len(rollout_s)]}
        lines.append(json.dumps({"step": step, "time": 1e9 + step, "metrics": {**METRICS, **own}}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_it_prints_constants_with_residuals_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path, 9)
    assert main(["calibrate", str(tmp_path), "--samples", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fitted to 7 steps after the first 2, of 2 devices"
    assert ["train_token_s", "0.000625", "0%"] in [line.split()[:3] for line in lines]
    found = read_calibration(tmp_path / "calibration.json")
    assert (found.steps, found.workload.prompts, found.seats) == (7, 16, 32)
    assert main(["calibrate", str(tmp_path), "--samples", "4", "--out", str(tmp_path / "c")]) == 0
    assert json.loads((tmp_path / "c").read_text()) == json.loads((tmp_path / "calibration.json").read_text())


def test_a_mean_rate_has_the_spread_of_the_steps_and_no_residual(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_steps(tmp_path, 9, rollout_s=(1.6, 2.0, 2.4))
    assert main(["calibrate", str(tmp_path), "--samples", "4"]) == 0
    rates = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rates")]
    assert rates and all(" 17%  tokens/s of an engine; the mean of the run" in line for line in rates)


def test_a_run_is_found_by_its_folder_by_a_file_in_it_and_from_above(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "sums" / "checkpoints"
    folder.mkdir(parents=True)
    write_steps(folder, 9)
    (folder / "devices.trace.json").touch()
    for given in (folder, folder / "metrics.jsonl", folder / "devices.trace.json", tmp_path / "runs"):
        assert run_of(given) in (folder, folder / "metrics.jsonl")
        assert main(["calibrate", str(given), "--samples", "4"]) == 0
        assert f"written to {folder / 'calibration.json'}" in capsys.readouterr().out
    (other := tmp_path / "runs" / "other").mkdir()
    write_steps(other, 9)
    assert run_of(folder) == folder
    with pytest.raises(ConfigError, match=f"2 runs are below it. Give one of them: {other}, {folder}"):
        run_of(tmp_path / "runs")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither it nor a folder up to 4 levels below it has a metrics"):
        run_of(tmp_path / "empty")


def test_a_run_says_itself_how_its_steps_are_divided(tmp_path: Path) -> None:
    write_steps(tmp_path, 9)
    RunDescription("p/e", 1.0, "colocated", samples=4, updates=2).write(tmp_path)
    host_s = list[float]()
    for given, prompts in (([], 16), (["--samples", "8"], 8), (["--updates", "1"], 16)):
        assert main(["calibrate", str(tmp_path), *given]) == 0
        found = read_calibration(tmp_path / "calibration.json")
        assert found.workload.prompts == prompts
        host_s.append(found.machine.host_s)
    assert host_s[0] == host_s[1] == host_s[2] / 2 > 0, "of each of two updates, unless another number is given"


def test_on_shared_cores_the_hosts_work_is_assumed_as_on_two_cores(tmp_path: Path) -> None:
    write_steps(tmp_path, 9)
    assert main(["calibrate", str(tmp_path), "--samples", "4", "--shared-cores"]) == 0
    machine = read_calibration(tmp_path / "calibration.json").machine
    assert machine.host_shares and machine.host_token_s == TWO_CORES.host_token_s


def test_mistakes_are_one_line_and_leave_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path, 4)
    (file := tmp_path / "model.bin").write_bytes(b"\x80\x81\xff\n")
    for arguments, message in (
        ([str(file), "--samples", "4"], f"RUN='{file}': it cannot be read as step metrics"),
        ([str(tmp_path), "--samples", "4"], "2 steps after the first 2 are too few"),
        ([str(tmp_path / "x")], "RUN="),
        ([str(tmp_path), "--skip", "-1"], "--skip=-1"),
        ([str(tmp_path), "--samples", "0"], "--samples=0"),
        ([str(tmp_path)], "--samples=None: the run has no run.json that says how many samples a prompt had"),
    ):
        assert main(["calibrate", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "model.bin"}


def test_constants_that_cannot_be_written_are_refused_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(tmp_path, 9)
    command = ["calibrate", str(tmp_path), "--samples", "4"]
    for out, why in ((tmp_path / "missing" / "c.json", "No such file or directory"), (tmp_path, "it is a folder")):
        assert main([*command, "--out", str(out)]) == 2
        assert f"--out='{out}': {why}. Give a" in capsys.readouterr().err

    def full(path: Path, *_: object, **__: object) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main(command) == 2
    assert f"--out='{tmp_path / 'calibration.json'}': No space left on device" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
