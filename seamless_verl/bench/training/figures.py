"""From what a run logged to its figures, and from the figures of several runs to one row. Pure arithmetic.

Time is taken between the ends of two steps, as they were logged; the first `skip` steps are left out, in which
engines warm up and asynchronous modes fill their queues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from seamless_verl.bench.training.workloads import Workload
from seamless_verl.errors import ConfigError

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
class Row(PerStep):
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


def row(arm: str, runs: Mapping[int, Figures], baseline: Mapping[int, Figures]) -> Row:
    """Runs by round, of the arm and of the baseline."""
    rates = [run.tokens_per_s for run in runs.values()]
    shared = runs.keys() & baseline.keys()

    def typical(name: str) -> float | None:
        return middle(value for run in runs.values() if (value := getattr(run, name)) is not None)

    return Row(
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
