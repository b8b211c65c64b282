"""Formats simulated results as a table or as JSON, and compares the simulator with measured runs of verl's modes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean

from seamless_verl.runtime.tables import text_table
from seamless_verl.simulator.engine import SimulatedUse
from seamless_verl.simulator.scenario import BOTH, ROLLOUT, SCHEDULERS, Scenario, machine_named, workload_named
from seamless_verl.simulator.simulate import Result, simulate

LAYOUTS = {
    "sync": (BOTH, BOTH),
    "colocate_async": (BOTH, BOTH),
    "separate_async": (BOTH, ROLLOUT),
    "separate_async_switch": (BOTH, ROLLOUT),
}


@dataclass(frozen=True)
class MeasuredMode:
    """Tokens/s of one run of verl 0.9.1, prompts included."""

    workload: str
    seats: int
    mode: str
    tokens_per_s: float


MEASURED = (
    MeasuredMode("w2", 32, "sync", 1439),
    MeasuredMode("w2", 32, "colocate_async", 1969),
    MeasuredMode("w2", 32, "separate_async", 2205),
    MeasuredMode("w2", 32, "separate_async_switch", 2112),
    MeasuredMode("w1_wide", 8, "sync", 1472),
    MeasuredMode("w1_wide", 8, "colocate_async", 1685),
    MeasuredMode("w1_wide", 8, "separate_async", 1824),
    MeasuredMode("w1_wide", 8, "separate_async_switch", 1914),
)


def simulate_mode(row: MeasuredMode, *, seeds: int = 2, steps: int = 20) -> float:
    """Tokens/s of the measured run in virtual time, the mean of `seeds` runs."""
    runs = [
        Scenario(
            workload_named(row.workload),
            LAYOUTS[row.mode],
            SCHEDULERS[row.mode],
            machine_named("two_cores"),
            seats=row.seats,
            steps=steps,
            seed=seed,
        )
        for seed in range(1, seeds + 1)
    ]
    return mean(simulate(run).tokens_per_s for run in runs)


RUN_HEADER = (
    "RUN", "TOK/S", "STEP", "LONGEST", "BOUND", "OF BOUND", "IDLE", "HELD", "STALE", "AGE", "LENT/STEP",
)  # fmt: skip
SAMPLES_HEADER = ("SAMPLES OF A GROUP", "PASS RATE", "MEAN")
DEVICE_HEADER = ("DEVICE", *(kind.value.upper() for kind in SimulatedUse))


def results_to_json(results: Mapping[str, Result]) -> str:
    return json.dumps({name: result.as_dict() for name, result in results.items()}, indent=2)


def results_table(results: Mapping[str, Result]) -> str:
    """A table of the runs, one of how each device's time was spent, and with a sampler one of the sizes of groups."""
    runs = [_run_cells(name, result) for name, result in results.items()]
    devices = [cells for name, result in results.items() for cells in _device_rows(name, result)]
    text = f"{text_table(RUN_HEADER, runs, align='<>')}\n\n{text_table(DEVICE_HEADER, devices, align='<>')}"
    samples = [
        (name, rate, f"{mean_size:.1f}")
        for name, result in results.items()
        for rate, mean_size in result.samples.items()
    ]
    return f"{text}\n\n{text_table(SAMPLES_HEADER, samples, align='<>')}" if samples else text


def calibration_table() -> str:
    """A table of verl's modes: measured, simulated, and the difference."""
    rows = []
    for row in MEASURED:
        simulated = simulate_mode(row)
        off = f"{simulated / row.tokens_per_s - 1:+.0%}"
        rows.append((f"{row.workload} {row.mode}", f"{row.tokens_per_s:.0f}", f"{simulated:.0f}", off))
    return text_table(("RUN", "MEASURED", "SIMULATED", "OFF BY"), rows, align="<>")


def _run_cells(name: str, result: Result) -> tuple[str, ...]:
    times = (f"{result.step_s:.2f}s", f"{result.longest_step_s:.2f}s", f"{result.bound_step_s:.2f}s")
    shares = (f"{result.of_bound:.0%}", f"{result.idle_share:.1%}", f"{result.held_share:.0%}")
    ages = (str(result.max_staleness), f"{result.mean_token_age:.2f}", f"{result.lendings_per_step:.1f}")
    return (name, f"{result.tokens_per_s:.0f}", *times, *shares, *ages)


def _device_rows(name: str, result: Result) -> list[tuple[str, ...]]:
    return [
        (f"{name} {device}", *(f"{shares[kind.value]:.1%}" for kind in SimulatedUse))
        for device, shares in result.shares.items()
    ]
