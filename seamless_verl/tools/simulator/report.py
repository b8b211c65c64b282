"""Formats simulated results as a table or as JSON, and compares the simulator with measured runs of verl's modes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from seamless_verl.cli.output import text_table
from seamless_verl.tools.simulator.engine import SimulatedUse
from seamless_verl.tools.simulator.machine import TWO_CORES
from seamless_verl.tools.simulator.scenario import BOTH, ROLLOUT, SCHEDULERS, WORKLOADS, Scenario, Scheduler
from seamless_verl.tools.simulator.simulate import Result, simulate

POLL_S = 0.1  # of verl's modes in these runs


@dataclass(frozen=True)
class MeasuredRun:
    """One run on two cores; `fitted` ones were used to choose the machine's numbers, the others were held back.

    A `bench` run generated what the training bench draws, and its `tokens_per_s` are generated tokens; those of the
    others count prompts. The first `skip` of its `steps` are not measured. `max_staleness` and `ahead` are of ours.
    """

    workload: str
    mode: str
    tokens_per_s: float
    seats: int = 64
    fitted: bool = False
    bench: bool = True
    steps: int = 16
    skip: int = 6
    max_staleness: int = 0
    ahead: int = 0

    @property
    def name(self) -> str:
        bound = f"-s{self.max_staleness}-ahead{self.ahead}" if self.mode == "seamless" else ""
        return f"{self.workload} {self.mode}{bound}"


MEASURED = (
    MeasuredRun("w1", "sync", 1419, fitted=True, steps=14, skip=3),
    MeasuredRun("w1", "separate_async", 1682, fitted=True, steps=14, skip=3),
    MeasuredRun("w2", "sync", 1274, fitted=True),
    MeasuredRun("w2", "separate_async", 2145),
    MeasuredRun("w1", "seamless", 2346, steps=14, skip=3, max_staleness=8, ahead=4),
    MeasuredRun("w2", "seamless", 2642, max_staleness=20, ahead=4),
    MeasuredRun("w3", "sync", 1651, steps=11, skip=3),
    MeasuredRun("w3", "seamless", 2558, steps=11, skip=3, max_staleness=4, ahead=2),
    MeasuredRun("w2", "sync", 1439, seats=32, bench=False),
    MeasuredRun("w2", "colocate_async", 1969, seats=32, bench=False),
    MeasuredRun("w2", "separate_async", 2205, seats=32, bench=False),
    MeasuredRun("w2", "separate_async_switch", 2112, seats=32, bench=False),
    MeasuredRun("w1_wide", "sync", 1472, seats=8, bench=False),
    MeasuredRun("w1_wide", "colocate_async", 1685, seats=8, bench=False),
    MeasuredRun("w1_wide", "separate_async", 1824, seats=8, bench=False),
    MeasuredRun("w1_wide", "separate_async_switch", 1914, seats=8, bench=False),
)
"""The training bench's page, and verl's modes in an earlier hour, whose tokens/s count prompts."""


def simulate_run(row: MeasuredRun) -> float:
    """Tokens/s of the measured run in virtual time, counted as there."""
    workload = replace(WORKLOADS[row.workload], bench=row.workload if row.bench else "")
    scheduler = replace(SCHEDULERS[row.mode], poll_s=POLL_S)
    if row.mode == "seamless":
        scheduler = Scheduler(max_staleness=row.max_staleness, ahead=row.ahead, updates=1, keep_cache=True)
    layout = (BOTH, ROLLOUT if row.mode.startswith("separate_async") else BOTH)
    run = Scenario(workload, layout, scheduler, TWO_CORES, seats=row.seats, steps=row.steps, warmup=row.skip)
    result = simulate(run)
    return result.generated_per_s if row.bench else result.tokens_per_s


RUN_HEADER = (
    "RUN", "TOK/S", "STEP", "LONGEST", "BOUND", "OF BOUND", "IDLE", "HELD", "STALE", "AGE", "LENT/STEP",
)  # fmt: skip
SAMPLES_HEADER = ("SAMPLES OF A GROUP", "PASS RATE", "MEAN")
DEVICE_HEADER = ("DEVICE", *(kind.value.upper() for kind in SimulatedUse))


def results_to_json(results: Mapping[str, Result]) -> str:
    return json.dumps({name: result.as_dict() for name, result in results.items()}, indent=2)


def results_table(results: Mapping[str, Result]) -> str:
    """A table of the runs, one of how each device's time was spent, and with a sampler one of the sizes of groups."""
    devices = [
        (f"{name} {device}", *(f"{shares[kind.value]:.1%}" for kind in SimulatedUse))
        for name, result in results.items()
        for device, shares in result.shares.items()
    ]
    samples = [(name, rate, f"{size:.1f}") for name, result in results.items() for rate, size in result.samples.items()]
    tables = [
        text_table(RUN_HEADER, [_run_cells(*item) for item in results.items()], align="<>"),
        text_table(DEVICE_HEADER, devices, align="<>"),
        *([text_table(SAMPLES_HEADER, samples, align="<>")] if samples else []),
    ]
    return "\n\n".join(tables)


def _run_cells(name: str, result: Result) -> tuple[str, ...]:
    times = (f"{result.step_s:.2f}s", f"{result.longest_step_s:.2f}s", f"{result.bound_step_s:.2f}s")
    shares = (f"{result.of_bound:.0%}", f"{result.idle_share:.1%}", f"{result.held_share:.0%}")
    ages = (str(result.max_staleness), f"{result.mean_token_age:.2f}", f"{result.lendings_per_step:.1f}")
    return (name, f"{result.tokens_per_s:.0f}", *times, *shares, *ages)


def calibration_table() -> str:
    """A table of runs: measured, simulated, the difference, and whether the run was used for the fit."""
    rows = []
    for row in MEASURED:
        simulated = simulate_run(row)
        off = f"{simulated / row.tokens_per_s - 1:+.0%}"
        used = "fitted" if row.fitted else "held back" if row.bench else "held back, another hour"
        rows.append((row.name, f"{row.tokens_per_s:.0f}", f"{simulated:.0f}", off, used))
    return text_table(("RUN", "MEASURED", "SIMULATED", "OFF BY", ""), rows, align="<>>><")
