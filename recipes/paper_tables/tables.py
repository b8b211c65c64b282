"""Simulates the published comparisons of SeamlessFlow with verl: `python tables.py [--table swe] [--devices 32 64]`.

Nothing here is measured. Times are an H800's published figures and a model's sizes; lengths and tools are assumed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from seamless_verl.cli.output import text_table
from seamless_verl.resources.model_facts import ModelFacts
from seamless_verl.tools.simulator.machine import ACCELERATORS, machine_of, seats_of
from seamless_verl.tools.simulator.scenario import BOTH, ROLLOUT, SCHEDULERS, Scenario, Scheduler, SimulatedWorkload
from seamless_verl.tools.simulator.simulate import Result, simulate

HERE = Path(__file__).parent
DEVICE, CACHE_SHARE, MOST_SEATS = "h800", 0.6, 256
VERL_POLL_S = 2.0
UPDATES = 4  # local updates of a step, in every mode


@dataclass(frozen=True)
class Table:
    """One published comparison; a replica has `replica` devices."""

    workload: SimulatedWorkload
    model: str
    replica: int
    published: str


TABLES = {
    "single_turn": Table(
        SimulatedWorkload(prompts=256, samples=8, median=1800, sigma=0.9, cap=8192, prompt_tokens=500),
        "qwen3_8b.json",
        1,
        "2x tokens/s and -62% time on 32 H800, on the mean of its runs; idle below 5%",
    ),
    "swe": Table(
        SimulatedWorkload(
            prompts=64,
            samples=8,
            median=250,
            sigma=1.0,
            cap=4096,
            turns=30,
            tool_mean_s=8.0,
            tool_sigma=1.3,
            tool_tokens=900,
            prompt_tokens=3000,
        ),
        "qwen3_32b.json",
        8,
        "1.55x tokens/s on the mean of its runs, more at 64 devices than at 32",
    ),
}
OURS = "ours, "


def arms(units: int) -> Iterator[tuple[str, tuple[frozenset[str], ...], Scheduler]]:
    """Name, tags of each unit, scheduler. Of disjoint tags and of multiplexing half of the units train."""
    half = units // 2
    together, apart = (BOTH,) * units, (*(BOTH,) * half, *(ROLLOUT,) * (units - half))
    for mode in ("sync", "colocate_async", "separate_async", "separate_async_switch"):
        devices = together if mode in ("sync", "colocate_async") else apart
        yield f"verl {mode}", devices, replace(SCHEDULERS[mode], poll_s=VERL_POLL_S)
    ours = Scheduler(max_staleness=1, updates=UPDATES)
    yield f"{OURS}train+rollout, S=1", together, replace(ours, updates=1)
    yield f"{OURS}half train+rollout, S=1", apart, ours
    yield f"{OURS}train+rollout, S=4", together, replace(ours, updates=1, max_staleness=4, ahead=1)
    yield f"{OURS}half train+rollout, S=4", apart, replace(ours, max_staleness=4, ahead=1)


def simulated(table: Table, devices: int, *, steps: int, seeds: int) -> dict[str, list[Result]]:
    """Results by arm, one for each seed."""
    model = ModelFacts.read(json.loads((HERE / table.model).read_text()))
    assert model is not None
    workload, unit = table.workload, table.replica
    samples = [turns for n in range(100) for turns in workload.group(1, n)]
    context = workload.prompt_tokens + mean(sum(t.tokens + t.tool_tokens for t in turns) for turns in samples)
    accelerator = ACCELERATORS[DEVICE]
    machine = machine_of(accelerator, model, unit, length=context, recompute=True)
    seats = seats_of(accelerator, model, unit, context=context, share=CACHE_SHARE, most=MOST_SEATS)
    found: dict[str, list[Result]] = {}
    for name, tags, scheduler in arms(devices // unit):
        own = replace(machine, host_s=machine.host_s / scheduler.updates)
        if not name.startswith(OURS):
            own = replace(own, sync_s=own.sync_s + own.load_s)  # every engine stops for the whole of an update
        bound = replace(scheduler, look_s=1.0)
        runs = (
            Scenario(workload, tags, bound, own, seats=seats, steps=steps, warmup=steps // 3, seed=seed)
            for seed in range(1, seeds + 1)
        )
        found[name] = [simulate(run) for run in runs]
    return found


def rows(results: dict[str, list[Result]]) -> Iterator[tuple[str, ...]]:
    """Name, tokens/s, to verl's sync, to verl's best mode, idle share, staleness."""
    speeds = {name: mean(r.tokens_per_s for r in of) for name, of in results.items()}
    rival = max(speed for name, speed in speeds.items() if not name.startswith(OURS))
    for name, of in results.items():
        to_sync, to_rival = speeds[name] / speeds["verl sync"], speeds[name] / rival
        idle, stale = mean(r.idle_share for r in of), max(r.max_staleness for r in of)
        yield name, f"{speeds[name]:,.0f}", f"{to_sync:.2f}", f"{to_rival:.2f}", f"{idle:.1%}", str(stale)


HEADER = ("ARM", "TOK/S", "TO SYNC", "TO VERL'S BEST", "IDLE", "STALEST")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--devices", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    for name in args.table:
        for devices in args.devices:
            results = simulated(TABLES[name], devices, steps=args.steps, seeds=args.seeds)
            table = text_table(HEADER, list(rows(results)), align="<>")
            sys.stdout.write(f"{name}, {devices} {DEVICE}; published: {TABLES[name].published}\n{table}\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
