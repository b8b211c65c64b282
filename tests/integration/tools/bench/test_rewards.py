"""Runs of bench.rewards, with a short recipe in the place of one that trains."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.integration
RECIPE = """#!/usr/bin/env bash
set -euo pipefail
mkdir -p "$DATA"
echo "$@" >> "$DATA/asked"
sleep "$(cat "$(dirname "$0")/seconds")"  # as a recipe makes its data, in a process of its own
[[ "$*" != *colocate_async* ]] || exit 3
for step in 0 5 10 15; do
  echo "{\\"step\\": $step, \\"data\\": {\\"val-core/task/reward/mean@1\\": 0.$step}}" >> "$VERL_FILE_LOGGER_PATH"
done
"""


def bench(folder: Path, arms: str, seconds: float = 0.0) -> subprocess.Popen[str]:
    (folder / "recipe").mkdir(exist_ok=True)
    (folder / "recipe" / "seconds").write_text(str(seconds))
    script = folder / "recipe" / "run.sh"
    script.write_text(RECIPE)
    script.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "seamless_verl.tools.bench.rewards",
        "--recipe",
        str(folder / "recipe"),
        "--arms",
        arms,
    ]
    command += ["--seeds", "1,2", "--steps", "15", "--out", str(folder / "out")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def asked(folder: Path) -> int:
    return len((folder / "out" / "data" / "asked").read_text().splitlines())


def test_each_trainer_and_seed_is_run_once(tmp_path: Path) -> None:
    for _ in range(2):
        output, errors = bench(tmp_path, "sync,seamless:seamless.ahead=1").communicate(timeout=300)
        assert "seamless:seamless.ahead=1: 0.250, +0.000 +- 0.000 (95%) to sync: within noise" in output, errors
    assert asked(tmp_path) == 4


def test_a_run_that_fails_ends_it_and_is_no_result(tmp_path: Path) -> None:
    for times in (1, 2):
        process = bench(tmp_path, "colocate_async,sync")
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 1 and "colocate_async-seed1: code 3, see" in errors
        assert asked(tmp_path) == times


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_stopped_leaves_nothing_and_is_no_result(tmp_path: Path, number: int) -> None:
    process = bench(tmp_path, "sync,seamless", seconds=1000)
    while not (tmp_path / "out" / "data" / "asked").exists():
        assert process.poll() is None
        time.sleep(0.02)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=300)
    assert process.returncode != 0 and not list((tmp_path / "out").glob("*/done"))
    assert psutil.wait_procs(started, timeout=60)[1] == []
