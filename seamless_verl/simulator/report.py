"""verl's own modes as measured on two cores, beside what the simulator says of them: how far to believe it.

Results as a table or as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from seamless_verl.simulator.engine import SimulatedUse
from seamless_verl.simulator.scenario import BOTH, ROLLOUT, SCHEDULERS, Scenario, machine, workload
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


def simulated(row: MeasuredMode, *, seeds: int = 2, steps: int = 20) -> float:
    """Tokens/s of the same run in virtual time, the mean of `seeds` runs."""
    runs = [
        Scenario(
            workload(row.workload),
            LAYOUTS[row.mode],
            SCHEDULERS[row.mode],
            machine("two_cores"),
            seats=row.seats,
            steps=steps,
            seed=seed,
        )
        for seed in range(1, seeds + 1)
    ]
    return mean(simulate(run).tokens_per_s for run in runs)


HEADER = (
    "RUN", "TOK/S", "STEP", "LONGEST", "BOUND", "OF BOUND", "IDLE", "HELD", "STALE", "AGE", "LENT/STEP",
)  # fmt: skip
DEVICES = ("DEVICE", *(kind.value.upper() for kind in SimulatedUse))


def as_json(results: Mapping[str, Result]) -> str:
    return json.dumps({name: result.as_dict() for name, result in results.items()}, indent=2)


def as_table(results: Mapping[str, Result]) -> str:
    """The runs, and below them what each device's time went into."""
    runs = [HEADER, *(_cells(name, result) for name, result in results.items())]
    devices = [DEVICES, *(line for name, result in results.items() for line in _devices(name, result))]
    return f"{columns(runs)}\n\n{columns(devices)}"


def calibration_table() -> str:
    """verl's modes: measured, simulated, and the difference."""
    lines: list[Sequence[str]] = [("RUN", "MEASURED", "SIMULATED", "OFF BY")]
    for row in MEASURED:
        found = simulated(row)
        off = f"{found / row.tokens_per_s - 1:+.0%}"
        lines.append((f"{row.workload} {row.mode}", f"{row.tokens_per_s:.0f}", f"{found:.0f}", off))
    return columns(lines)


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Lines of equally many cells under each other, numbers flush right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _cells(name: str, result: Result) -> tuple[str, ...]:
    times = (f"{result.step_s:.2f}s", f"{result.longest_step_s:.2f}s", f"{result.bound_step_s:.2f}s")
    shares = (f"{result.of_bound:.0%}", f"{result.idle_share:.1%}", f"{result.held_share:.0%}")
    ages = (str(result.max_staleness), f"{result.mean_token_age:.2f}", f"{result.lendings_per_step:.1f}")
    return (name, f"{result.tokens_per_s:.0f}", *times, *shares, *ages)


def _devices(name: str, result: Result) -> list[tuple[str, ...]]:
    return [
        (f"{name} {device}", *(f"{shares[kind.value]:.1%}" for kind in SimulatedUse))
        for device, shares in result.shares.items()
    ]
