"""Runs one job of the bench in a folder of its own."""

from __future__ import annotations

import json

from seamless_verl.tools.bench.training.settings import STEPS_FILE, BenchPlan, bench_cores
from seamless_verl.tools.compare.running import Step, run_logged


def run(plan: BenchPlan, timeout_s: float) -> list[Step]:
    """Run a plan to its end; returns what it logged, and writes that to `steps.jsonl` in its folder.

    Raises:
        RunFailedError: it failed, logged too few steps, or took longer than `timeout_s`.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    plan.write_loops()
    steps = run_logged(
        plan.command(),
        plan.folder,
        plan.environment(),
        steps=plan.steps,
        timeout_s=timeout_s,
        cores=bench_cores(),
        cwd=plan.folder,
    )
    (plan.folder / STEPS_FILE).write_text("".join(json.dumps(step) + "\n" for step in steps))
    return steps
