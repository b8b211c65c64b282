"""Reports the runs of a workload. They are read from their folders, so runs of several invocations add up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seamless_verl.runtime.tables import text_table
from seamless_verl.tiny.files import replaced_file
from seamless_verl.tools.bench.training.arms import begins_prompts_again
from seamless_verl.tools.bench.training.figures import (
    Bound,
    FigureRow,
    Figures,
    Place,
    SampleRecord,
    bound,
    count_common,
    differences,
    figure_row,
    mean_prompt_tokens,
    mean_turn_s,
    read_samples,
    reward_curve,
)
from seamless_verl.tools.bench.training.settings import DEVICES, SAMPLES_FILE, STEPS_FILE
from seamless_verl.tools.bench.training.workloads import Workload

RESULT_FILE, RATES_FILE = "result.json", "rates.json"


@dataclass
class BenchReport:
    """`rows` with the fastest arm first; `unequal` names runs that did other work, and must be empty; `common` counts
    the samples that every run has generated."""

    workload: Workload
    steps: int
    baseline: str
    rows: list[FigureRow]
    turn_s: float
    common: int
    unequal: list[str]
    bound: Bound | None
    rates: dict[int, float] = field(default_factory=dict)
    reward_curves: dict[str, list[float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        limit = self.bound
        values = asdict(self)
        if limit is not None:
            values["bound"] |= {"step_s": limit.step_s, "tokens_per_s": limit.tokens_per_s}
        return values


def write_result(folder: Path, arm: str, number: int, found: Figures) -> None:
    """Writes the result of a finished run; a run without it did not finish."""
    with replaced_file(folder / RESULT_FILE) as temporary:
        temporary.write_text(json.dumps({"arm": arm, "round": number, **found.as_dict()}))


def make_report(workload: Workload, steps: int, folder: Path) -> BenchReport | None:
    """Of all finished runs under `folder`; None when there is none."""
    runs: dict[str, dict[int, Figures]] = {}
    samples: dict[str, dict[Place, SampleRecord]] = {}
    reward_curves: dict[str, list[float]] = {}
    for file in sorted(folder.glob(f"*/{RESULT_FILE}")):
        values = json.loads(file.read_text())
        runs.setdefault(values["arm"], {})[values["round"]] = Figures.from_dict(values)
        begins_again = begins_prompts_again(values["arm"])
        samples[file.parent.name] = read_samples(file.parent / SAMPLES_FILE, begins_again=begins_again)
        lines = (file.parent / STEPS_FILE).read_text().splitlines()
        reward_curves[file.parent.name] = reward_curve([json.loads(line) for line in lines])
    if not runs:
        return None
    baseline = baseline_of(list(runs))
    rows = [figure_row(arm, found, runs[baseline]) for arm, found in runs.items()]
    everything = [sample for run in samples.values() for sample in run.values()]
    rates = read_rates(folder / RATES_FILE)
    return BenchReport(
        workload=workload,
        steps=steps,
        baseline=baseline,
        rows=sorted(rows, key=lambda row: -row.tokens_per_s),
        turn_s=mean_turn_s(everything),
        common=count_common(samples.values()),
        unequal=differences(samples),
        bound=bound_of(workload, steps, rows, mean_prompt_tokens(everything), rates),
        rates=rates,
        reward_curves=reward_curves,
    )


def baseline_of(arms: Sequence[str]) -> str:
    """`sync` as shipped, or with a shorter poll, or the first arm."""
    return next((name for name in ("sync", "sync-poll") if name in arms), arms[0])


def bound_of(
    workload: Workload, steps: int, rows: Sequence[FigureRow], prompt_tokens: float, rates: Mapping[int, float]
) -> Bound | None:
    """The bound with the fastest update of any arm; None without rates or updates."""
    updates = [row.update_s_per_token for row in rows if row.update_s_per_token is not None]
    if not rates or not updates:
        return None
    update = min(updates)
    return bound(
        workload,
        steps=steps,
        prompt_tokens=prompt_tokens,
        rates=rates,
        update_s_per_token=update,
        devices=DEVICES,
    )


def read_rates(file: Path) -> dict[int, float]:
    return {int(size): rate for size, rate in json.loads(file.read_text()).items()} if file.exists() else {}


HEADER = (
    *("arm", "rounds", "tok/s", "lowest", "highest", "ratio", "step s", "wait", "update", "sync", "lent"),
    *("stale", "dropped", "budget", "of bound"),
)


def report_text(report: BenchReport) -> str:
    """The report for people: a table of the arms, and below it what its columns mean."""
    title = f"{report.workload.name}: {report.workload.what}; runs of {report.steps} steps"
    table = text_table(HEADER, [[*cells(row), share(report.bound, row)] for row in report.rows], align="<>")
    return "\n".join([title, table, *explanations(report)]) + "\n"


def cells(row: FigureRow) -> list[str]:
    rates = (f"{rate:.0f}" for rate in (row.tokens_per_s, row.lowest, row.highest))
    times = (format_number(value, 2) for value in (row.step_s, row.wait_s, row.update_s, row.sync_s, row.lent_s))
    return [
        *(row.arm, str(row.rounds), *rates, format_number(row.ratio, 2), *times),
        *(format_number(row.staleness, 0), f"{row.evicted:.0f}", f"{row.budget:.3f}"),
    ]


def share(limit: Bound | None, row: FigureRow) -> str:
    return "-" if limit is None else f"{row.tokens_per_s / limit.tokens_per_s:.0%}"


def format_number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def explanations(report: BenchReport) -> list[str]:
    """What the columns mean, the bound and its parts, and whether all runs did the same work."""
    tool = report.workload.tool
    lines = [
        f"tok/s: generated tokens trained in a second, median of rounds; ratio to {report.baseline} of the same round.",
        "step, wait (for samples), update, sync (of weights), lent (a trainer's device generating): median seconds.",
        "stale: weight versions behind, at most. budget: tokens trained over those of as many prompts in order.",
        f"A turn's generation took {report.turn_s:.2f} s"
        + ("." if tool is None else f", a tool's work {tool.mean:.2f} s, on average."),
    ]
    if (limit := report.bound) is not None:
        lines.append(
            f"Bound: {limit.tokens_per_s:.0f} tok/s, {limit.step_s:.2f} s a step: {limit.generate_s:.2f} device-seconds"
            f" of generation and {limit.update_s:.2f} of update on {limit.devices} devices."
        )
        rates = ", ".join(f"{size}: {rate:.0f}" for size, rate in report.rates.items())
        lines.append(f"An engine alone, tokens a second by samples in flight: {rates}.")
    agree = f"The same prompts and lengths in all runs; {report.common} samples are in every one."
    same = "NOT THE SAME WORK:" if report.unequal else agree
    return [*lines, same, *report.unequal[:10]]
