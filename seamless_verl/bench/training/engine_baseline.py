"""What an engine does alone, measured before the runs: the bound's rates, and how long a turn takes on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from seamless_verl.bench.training.arms import Arm
from seamless_verl.bench.training.report import RATES_FILE, read_rates
from seamless_verl.bench.training.running import process_of
from seamless_verl.bench.training.settings import DEVICES, BenchPlan
from seamless_verl.bench.training.workloads import Workload
from seamless_verl.errors import ConfigError


def timed(
    workload: Workload, turn_s: float | None, *, bound: bool, model: Path, folder: Path, timeout_s: float
) -> Workload:
    """Whose tools take `turn_s` on the mean, by default as long as a turn takes here.

    The engine is measured alone where that, or the report's bound, needs it; once in each folder. ConfigError where
    it could not be, and a tool's time is not given.
    """
    by_measure = workload.tool is not None and turn_s is None
    file = folder / RATES_FILE
    if (by_measure or bound) and not file.exists():
        measure_rates(workload, model, folder, timeout_s)
    if not by_measure:
        return workload if turn_s is None else workload.with_turn(turn_s)
    if not file.exists():
        reason = "the engine could not be measured alone, and so nobody knows how long a tool is to take"
        raise ConfigError("--turn-s", None, reason, f"Give --turn-s, or see {folder / 'rates.txt'}")
    return workload.with_turn(workload.turn_s(read_rates(file), DEVICES))


def measure_rates(workload: Workload, model: Path, folder: Path, timeout_s: float) -> None:
    """In a process of its own, which ends with the engine's; says why where it could not be."""
    module = "seamless_verl.bench.training.rates"
    places = ["--workload", workload.name, "--model", str(model), "--out", str(folder / RATES_FILE)]
    env = BenchPlan(workload, Arm("rates", module, 0), 0, model, folder, {}).environment()
    command = [sys.executable, "-W", "ignore", "-m", module, *places]
    why = f"see {folder / 'rates.txt'}"
    with (folder / "rates.txt").open("wb") as log:
        whole: dict[str, Any] = {"env": env, "stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        with process_of(command, group=True, **whole) as process:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                why = f"it took more than --timeout {timeout_s:g}; {why}"
    if process.returncode != 0:
        sys.stderr.write(f"The engine could not be measured alone: {why}\n")
