"""What holds of a workload's runs alone: whether they did the same work, and how near each is to a bound. Pure.

The bubble-free bound is the time of a step if all devices were busy at unit rates all the time:

    step_s >= (generated / rate + trained * update) / devices

`rate` is what one engine alone generates in a second with every seat taken; `update` the device-seconds a trained token
takes, the fastest of any arm. Prefill, weight updates, hand-overs and helpers are left out, so no trainer can reach it.
It takes any staleness for granted: without staleness a batch's own tail adds to it. The same work: samples at the same
place (the prompt's index, the sample's number in its group) have the same prompt and lengths in every run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from seamless_verl.tools.compare.figures import Spread, of_known
from seamless_verl.tools.compare.workloads import DEVICES, Workload

SHOWN = 10  # differences
Place = tuple[int, int]
Logged = Sequence[Mapping[str, Any]]


class SampleRecord(NamedTuple):
    """A finished sample: its prompt, and the tokens and seconds of its turns."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def work(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.prompt, self.tokens


class WorkedRun(NamedTuple):
    """A finished run: its arm, what it logged, what it generated, and how many devices update together."""

    arm: str
    name: str
    logged: Logged
    samples: Mapping[Place, SampleRecord]
    trains: int


class Bound(NamedTuple):
    """The bound of a mean step: its generated tokens, and the device-seconds that these and the trained ones take."""

    generated: float
    generate_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        return (self.generate_s + self.update_s) / DEVICES

    @property
    def tokens_per_s(self) -> float:
        return self.generated / self.step_s


@dataclass(frozen=True)
class ForcedWork:
    """Of a workload's runs: generated tokens trained in a second by arm, their budget, the bound, and what differs.

    `budget` is the generated tokens that were trained over those of as many prompts in the data set's order:
    asynchronous modes take what is finished first, so that it need not be 1. `lines` are sentences of the report.
    """

    rates: Mapping[str, Spread]
    budget: Mapping[str, float]
    bound: Bound | None
    unequal: tuple[str, ...]
    lines: tuple[str, ...]


def forced_work(workload: Workload, runs: Sequence[WorkedRun], rates: Mapping[int, float], skip: int) -> ForcedWork:
    """The facts of finished runs, at least one; without `rates` of an engine alone there is no bound."""
    by_arm = {run.arm: [other for other in runs if other.arm == run.arm] for run in runs}
    every = [sample for run in runs for sample in run.samples.values()]
    found = {arm: Spread.of(rate_of(workload, run.logged, skip) for run in of_arm) for arm, of_arm in by_arm.items()}
    limit, unequal = bound_of(workload, runs, every, rates, skip), differences({run.name: run.samples for run in runs})
    turn_s = mean(second for sample in every for second in sample.seconds)
    tools = "" if workload.tool is None else f", a tool's work {workload.tool.mean:.2f} s"
    lines = [f"{workload.what}. A turn's generation took {turn_s:.2f} s{tools}, on the mean."]
    if limit is not None:
        lines.append(
            f"The bubble-free bound is {limit.tokens_per_s:,.0f} tokens/s, {limit.step_s:.2f} s a step: "
            f"{limit.generate_s:.2f} device-seconds of generation and {limit.update_s:.2f} of update on "
            f"{DEVICES} devices."
        )
    common = len(set.intersection(*(set(run.samples) for run in runs)))
    same = f"The same prompts and lengths in all runs; {common} samples are in every one."
    return ForcedWork(
        rates={arm: spread for arm, spread in found.items() if spread is not None},
        budget={arm: median(budget_of(workload, run.logged) for run in of_arm) for arm, of_arm in by_arm.items()},
        bound=limit,
        unequal=tuple(unequal),
        lines=(*lines, "NOT THE SAME WORK:" if unequal else same, *unequal[:SHOWN]),
    )


def generated(workload: Workload, data: Mapping[str, float]) -> int:
    """Tokens of a step that engines generated: its responses without the tools' part."""
    return round(data["response_length/mean"] * workload.step_samples) - workload.tool_tokens_of_step


def rate_of(workload: Workload, logged: Logged, skip: int) -> float:
    """Generated tokens trained in a second, after the first steps."""
    tokens = sum(generated(workload, step["data"]) for step in logged[skip:])
    seconds: float = logged[-1]["at"] - logged[skip - 1]["at"]
    return tokens / seconds


def budget_of(workload: Workload, logged: Logged) -> float:
    in_order = workload.generated(range(len(logged) * workload.prompts))
    return sum(generated(workload, step["data"]) for step in logged) / in_order


def bound_of(
    workload: Workload,
    runs: Sequence[WorkedRun],
    samples: Sequence[SampleRecord],
    rates: Mapping[int, float],
    skip: int,
) -> Bound | None:
    """The bound with the fastest update of any arm; None without rates or updates."""
    updates: dict[str, list[float]] = {}
    for run in runs:
        rows = [step["data"] for step in run.logged[skip:] if "timing_s/update_actor" in step["data"]]
        seconds = [row["timing_s/update_actor"] * run.trains / row["perf/total_num_tokens"] for row in rows]
        if (typical := of_known(median, seconds)) is not None:
            updates.setdefault(run.arm, []).append(typical)
    if workload.seats not in rates or not updates:
        return None
    steps = len(runs[0].logged)
    produced = workload.generated(range(steps * workload.prompts)) / steps
    prompts = mean(len(sample.prompt) for sample in samples) * workload.step_samples
    trained = produced + workload.tool_tokens_of_step + prompts
    return Bound(produced, produced / rates[workload.seats], trained * min(map(median, updates.values())))


def read_samples(path: Path, *, begins_again: bool = False) -> dict[Place, SampleRecord]:
    """The samples by place; `begins_again` where prompts that a step left over are generated anew in a later one.

    Raises ValueError for a place that comes twice, so that the data set would have begun anew; for one that is
    generated anew only if it then had other lengths.
    """
    found: dict[Place, SampleRecord] = {}
    for line in path.read_text().splitlines():
        values = json.loads(line)
        place = (values["index"], values["session"])
        sample = SampleRecord(*(tuple(values[name]) for name in ("prompt", "tokens", "seconds")))
        if place in found and not (begins_again and sample.work == found[place].work):
            raise ValueError(f"{path}: {place} was generated twice")
        found[place] = sample
    return found


def differences(runs: Mapping[str, Mapping[Place, SampleRecord]]) -> list[str]:
    """The samples that differ from the first run's at the same place; empty when all runs did the same work."""
    first: dict[Place, tuple[str, SampleRecord]] = {}
    found: list[str] = []
    for name, samples in runs.items():
        for place, sample in samples.items():
            earlier, expected = first.setdefault(place, (name, sample))
            if expected.work != sample.work:
                found.append(f"{name} differs from {earlier} at prompt {place[0]}, sample {place[1]}")
    return found
