"""Computes the figures of runs, compares their samples, and computes the bubble-free bound of a workload. Pure.

The bound is the time of a step if both devices were busy at unit rates all the time:

    step_s >= (generated / rate + trained * update) / devices

`rate` is what one engine alone generates in a second with every seat taken, by the workload's own lengths;
`update` the device-seconds a trained token takes. Prefill, weight updates, hand-overs and helpers are left out,
so no trainer can reach it. It takes any staleness for granted: without staleness a batch's own tail adds to it.

A line of `samples.jsonl` has the prompt's index, the sample's number in its group, the prompt's ids, and the lengths
and seconds of its turns. Invariant: samples at the same place (index, number) have the same prompt and the same
lengths in every run of a workload.

Times are between the logged ends of two steps. The first `skip` steps are left out: in them engines warm up, and
asynchronous modes fill their queues.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean, median
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.tools.bench.training.workloads import Workload
from seamless_verl.tools.compare.figures import EVICTED, REWARD, STALENESS_MAX, check_skip, highest, number
from seamless_verl.tools.compare.statistics import median_or_none


@dataclass(frozen=True)
class Bound:
    """The bound of a mean step: its tokens, the device-seconds they take, and the least wall time on all devices."""

    generated: float
    trained: float
    generate_s: float
    update_s: float
    devices: int

    @property
    def step_s(self) -> float:
        return (self.generate_s + self.update_s) / self.devices

    @property
    def tokens_per_s(self) -> float:
        return self.generated / self.step_s


def bound(
    workload: Workload,
    *,
    steps: int,
    prompt_tokens: float,
    rates: Mapping[int, float],
    update_s_per_token: float,
    devices: int,
) -> Bound:
    """The bound. `rates`: an engine's tokens a second by samples in flight; `prompt_tokens`: a prompt's mean length.

    ConfigError when `rates` has no entry for every seat taken.
    """
    if workload.seats not in rates:
        way_out = "Measure them again"
        raise ConfigError("rates", sorted(rates), f"none is for {workload.seats} samples in flight", way_out)
    generated = workload.generated(range(steps * workload.prompts)) / steps
    trained = generated + workload.tool_tokens_of_step + prompt_tokens * workload.step_samples
    return Bound(generated, trained, generated / rates[workload.seats], trained * update_s_per_token, devices)


Place = tuple[int, int]


@dataclass(frozen=True)
class SampleRecord:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def same_work(self, other: SampleRecord) -> bool:
        return self.prompt == other.prompt and self.tokens == other.tokens


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
        if place in found and not (begins_again and sample.same_work(found[place])):
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
            if not expected.same_work(sample):
                found.append(f"{name} differs from {earlier} at prompt {place[0]}, sample {place[1]}")
    return found


def count_common(runs: Iterable[Iterable[Place]]) -> int:
    """How many places all runs have in common."""
    places = [set(samples) for samples in runs]
    return len(set.intersection(*places)) if places else 0


def mean_prompt_tokens(samples: Iterable[SampleRecord]) -> float:
    """Mean tokens of a prompt."""
    return mean(len(sample.prompt) for sample in samples)


def mean_turn_s(samples: Iterable[SampleRecord]) -> float:
    """Mean seconds that a turn's generation took, waiting in a queue and pauses included."""
    return mean(second for sample in samples for second in sample.seconds)


Steps = Sequence[Mapping[str, Any]]
TIMINGS = {"wait_s": "gen", "update_s": "update_actor", "sync_s": "update_weights", "lent_s": "switch_wait"}


@dataclass(frozen=True)
class PerStep:
    """Figures of a step: seconds are medians of steps.

    `wait_s`: for samples; `update_s`: the actor's updates; `sync_s`: weights to the engines; `lent_s`: a
    trainer's device generating. None where a mode logs no such time. `update_s_per_token` is in device-seconds
    a trained token of any kind. `budget` is trained tokens over those of as many prompts in the data set's
    order, since the start: asynchronous modes take what is finished first, so it need not be 1.
    """

    step_s: float
    wait_s: float | None
    update_s: float | None
    sync_s: float | None
    lent_s: float | None
    update_s_per_token: float | None
    staleness: float | None
    evicted: float
    budget: float


@dataclass(frozen=True)
class Figures(PerStep):
    """The figures of one run, after its first steps; `tokens` are generated and trained."""

    tokens: int
    seconds: float
    start_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {"tokens_per_s": self.tokens_per_s, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Figures:
        return cls(**{f.name: values[f.name] for f in fields(cls)})


def figures(workload: Workload, steps: Steps, *, skip: int, trains: int) -> Figures:
    """The figures of a run. `trains` is how many devices update together. ConfigError when `skip` leaves no step."""
    check_skip(skip, len(steps))
    ends = [float(step["at"]) for step in steps]
    rows = [step["data"] for step in steps]
    kept = rows[skip:]
    per_token = [
        row["timing_s/update_actor"] * trains / row["perf/total_num_tokens"]
        for row in kept
        if "timing_s/update_actor" in row
    ]
    return Figures(
        tokens=sum(generated(workload, row) for row in kept),
        seconds=ends[-1] - ends[skip - 1],
        step_s=median(after - before for before, after in zip(ends[skip - 1 :], ends[skip:], strict=False)),
        update_s_per_token=median_or_none(per_token),
        staleness=highest(number(row, STALENESS_MAX) for row in kept),
        evicted=sum(number(row, EVICTED) or 0.0 for row in rows),
        budget=sum(generated(workload, row) for row in rows) / workload.generated(range(len(rows) * workload.prompts)),
        start_s=ends[0],
        **{
            name: median_or_none(row[key] for row in kept if (key := f"timing_s/{timer}") in row)
            for name, timer in TIMINGS.items()
        },
    )


def generated(workload: Workload, row: Mapping[str, float]) -> int:
    """Tokens of a step that engines generated: its responses without the tools' part."""
    return round(row["response_length/mean"] * workload.step_samples) - workload.tool_tokens_of_step


def reward_curve(steps: Steps) -> list[float]:
    """The mean reward of each step."""
    return [float(step["data"][REWARD]) for step in steps]


@dataclass(frozen=True)
class FigureRow(PerStep):
    """The figures of an arm over its rounds: medians, and the smallest and largest tokens a second.

    `ratio` is the median over rounds of its tokens a second over the baseline's of the same round; None where
    they have no round in common.
    """

    arm: str
    rounds: int
    tokens_per_s: float
    lowest: float
    highest: float
    ratio: float | None


def figure_row(arm: str, runs: Mapping[int, Figures], baseline: Mapping[int, Figures]) -> FigureRow:
    """The row of an arm; `runs` and `baseline` are by round."""
    rates = [run.tokens_per_s for run in runs.values()]
    shared = runs.keys() & baseline.keys()

    def typical(name: str) -> float | None:
        return median_or_none(value for run in runs.values() if (value := getattr(run, name)) is not None)

    return FigureRow(
        arm=arm,
        rounds=len(runs),
        tokens_per_s=median(rates),
        lowest=min(rates),
        highest=max(rates),
        ratio=median_or_none(runs[n].tokens_per_s / baseline[n].tokens_per_s for n in shared),
        step_s=median(run.step_s for run in runs.values()),
        staleness=highest(run.staleness for run in runs.values()),
        evicted=max(run.evicted for run in runs.values()),
        budget=median(run.budget for run in runs.values()),
        **{name: typical(name) for name in (*TIMINGS, "update_s_per_token")},
    )
