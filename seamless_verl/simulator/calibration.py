"""verl's own modes as measured on two cores, beside what the simulator says of them: how far to believe it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

from seamless_verl.simulator.machine import machine
from seamless_verl.simulator.scenario import BOTH, ROLLOUT, SCHEDULERS, Scenario
from seamless_verl.simulator.simulate import simulate
from seamless_verl.simulator.workloads import workload

LAYOUTS = {
    "sync": (BOTH, BOTH),
    "colocate_async": (BOTH, BOTH),
    "separate_async": (BOTH, ROLLOUT),
    "separate_async_switch": (BOTH, ROLLOUT),
}


@dataclass(frozen=True)
class Measured:
    """Tokens/s of one run of verl 0.9.1, prompts included."""

    workload: str
    seats: int
    mode: str
    tokens_per_s: float


MEASURED = (
    Measured("w2", 32, "sync", 1439),
    Measured("w2", 32, "colocate_async", 1969),
    Measured("w2", 32, "separate_async", 2205),
    Measured("w2", 32, "separate_async_switch", 2112),
    Measured("w1_wide", 8, "sync", 1472),
    Measured("w1_wide", 8, "colocate_async", 1685),
    Measured("w1_wide", 8, "separate_async", 1824),
    Measured("w1_wide", 8, "separate_async_switch", 1914),
)


def simulated(row: Measured, *, seeds: int = 2, steps: int = 20) -> float:
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
