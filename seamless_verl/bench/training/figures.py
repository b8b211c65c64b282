"""The bubble-free bound of a workload: the time of a step were both devices busy at unit rates all the time. Pure.

    step_s >= (generated / rate + trained * update) / devices

`rate` is what one engine alone generates in a second with every seat taken, by the workload's own lengths;
`update` the device-seconds a trained token takes. Prefill, weight updates, hand-overs and helpers are left out,
so no trainer can reach it, and staleness is not asked for: with none, a batch's own tail is in the way.

What every sample of a run was, and whether two runs did the same work. Pure.

A line of `samples.jsonl`: the prompt's index, the sample in its group, prompt ids, the lengths and seconds of its
turns. Law: samples at the same place have the same prompt and the same lengths in every run of a workload.

From what a run logged to its figures, and from the figures of several runs to one row. Pure arithmetic.

Time is taken between the ends of two steps, as they were logged; the first `skip` steps are left out, in which
engines warm up and asynchronous modes fill their queues.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean, median
from typing import Any

from seamless_verl.bench.training.workloads import Workload
from seamless_verl.errors import ConfigError


@dataclass(frozen=True)
class Bound:
    """Of a mean step: its tokens, the device-seconds they take, and the least wall time on all devices."""

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
    """`rates` are an engine's tokens a second by samples in flight; `prompt_tokens` the mean length of a prompt.

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


def read_samples(path: Path) -> dict[Place, SampleRecord]:
    """By place. Raises ValueError for a place that comes twice: the data set would have begun anew."""
    found: dict[Place, SampleRecord] = {}
    for line in path.read_text().splitlines():
        values = json.loads(line)
        place = (values["index"], values["session"])
        if place in found:
            raise ValueError(f"{path}: {place} was generated twice")
        found[place] = SampleRecord(*(tuple(values[name]) for name in ("prompt", "tokens", "seconds")))
    return found


def differences(runs: Mapping[str, Mapping[Place, SampleRecord]]) -> list[str]:
    """Where runs did other work than the first run that came to that place; empty when all did the same."""
    first: dict[Place, tuple[str, SampleRecord]] = {}
    found: list[str] = []
    for name, samples in runs.items():
        for place, sample in samples.items():
            earlier, known = first.setdefault(place, (name, sample))
            if not known.same_work(sample):
                found.append(f"{name} differs from {earlier} at prompt {place[0]}, sample {place[1]}")
    return found


def in_all(runs: Iterable[Iterable[Place]]) -> int:
    """How many places every run has come to."""
    places = [set(samples) for samples in runs]
    return len(set.intersection(*places)) if places else 0


def mean_prompt(samples: Iterable[SampleRecord]) -> float:
    """Tokens."""
    return mean(len(sample.prompt) for sample in samples)


def mean_turn_s(samples: Iterable[SampleRecord]) -> float:
    """Seconds that a turn's generation took, waiting in a queue and pauses included."""
    return mean(second for sample in samples for second in sample.seconds)


Steps = Sequence[Mapping[str, Any]]
TIMINGS = {"wait_s": "gen", "update_s": "update_actor", "sync_s": "update_weights", "lent_s": "switch_wait"}
STALENESS = "training/off_policy/trajectory_staleness_worst/max"
EVICTED = "training/off_policy/evicted_samples"


@dataclass(frozen=True)
class PerStep:
    """What a step of a run takes: seconds are medians of steps.

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
    """Of one run, after its first steps; `tokens` are generated and trained."""

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
        return cls(**{one.name: values[one.name] for one in fields(cls)})


def figures(workload: Workload, steps: Steps, *, skip: int, trains: int) -> Figures:
    """`trains` is how many devices update together. ConfigError when `skip` leaves no step."""
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
        update_s_per_token=middle(per_token),
        staleness=max(of(STALENESS, kept), default=None),
        evicted=sum(of(EVICTED, rows)),
        budget=sum(generated(workload, row) for row in rows) / workload.generated(range(len(rows) * workload.prompts)),
        start_s=ends[0],
        **{
            name: middle(row[key] for row in kept if (key := f"timing_s/{timer}") in row)
            for name, timer in TIMINGS.items()
        },
    )


def check_skip(skip: int, steps: int) -> None:
    """ConfigError unless a measured step is left, and one before it: the first step's beginning is not logged."""
    if not 1 <= skip < steps:
        way_out = f"Give --skip from 1 to {steps - 1}" if steps > 1 else "Give --steps 2 or more"
        raise ConfigError("--skip", skip, f"of {steps} steps, none can be measured", way_out)


def of(name: str, rows: Iterable[Mapping[str, float]]) -> list[float]:
    """A metric of the steps that have it."""
    return [row[name] for row in rows if name in row]


def generated(workload: Workload, row: Mapping[str, float]) -> int:
    """Tokens of a step that engines generated: its responses without the tools' part."""
    return round(row["response_length/mean"] * workload.step_samples) - workload.tool_tokens_of_step


def middle(values: Iterable[float]) -> float | None:
    """The median; None of nothing."""
    found = list(values)
    return median(found) if found else None


def curve(steps: Steps) -> list[float]:
    """The mean reward of each step."""
    return [float(step["data"]["critic/score/mean"]) for step in steps]


@dataclass(frozen=True)
class FigureRow(PerStep):
    """An arm over its rounds: medians, with the smallest and largest tokens a second.

    `ratio` is the median over rounds of its tokens a second over the baseline's of the same round; None where
    they have no round in common.
    """

    arm: str
    rounds: int
    tokens_per_s: float
    lowest: float
    highest: float
    ratio: float | None


def row(arm: str, runs: Mapping[int, Figures], baseline: Mapping[int, Figures]) -> FigureRow:
    """Runs by round, of the arm and of the baseline."""
    rates = [run.tokens_per_s for run in runs.values()]
    shared = runs.keys() & baseline.keys()

    def typical(name: str) -> float | None:
        return middle(value for run in runs.values() if (value := getattr(run, name)) is not None)

    return FigureRow(
        arm=arm,
        rounds=len(runs),
        tokens_per_s=median(rates),
        lowest=min(rates),
        highest=max(rates),
        ratio=middle(runs[n].tokens_per_s / baseline[n].tokens_per_s for n in shared),
        step_s=median(run.step_s for run in runs.values()),
        staleness=max((run.staleness for run in runs.values() if run.staleness is not None), default=None),
        evicted=max(run.evicted for run in runs.values()),
        budget=median(run.budget for run in runs.values()),
        **{name: typical(name) for name in (*TIMINGS, "update_s_per_token")},
    )
