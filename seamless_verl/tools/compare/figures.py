"""The figures of a run, from the steps that it logged and from what was seen of its devices; statistics of few runs.

Times are between the logged ends of two steps, with a step's validation and checkpoint in them: meanwhile asynchronous
modes, ours too, generate what later steps train, and sync has nothing in flight. The first `skip` steps are left out:
in them engines warm up, and asynchronous modes fill their queues. Tokens are those of the responses that were trained,
tools' answers included. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, median, variance
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.runtime.step_metrics import RESPONSE, StepRow, add_row, response_tokens, validation_reward

STALENESS = "training/off_policy/trajectory_staleness_worst"  # of each sample's oldest tokens
DROPPED_GROUPS = (
    "training/off_policy/evicted_samples",  # groups, whatever its name says
    "training/filter_groups/evicted_samples",
    "training/filter_groups/discarded_surplus_samples",
    "training/rollout_failure/evicted_samples",
)
"""Groups that were dropped whole: too old; by `algorithm.filter_groups` or a sampler; left over when a step of sync had
enough; failed. A group is in one of them. Only verl's asynchronous modes count one twice that is both too old and
filtered, and their logs do not say which."""
MASKED = tuple(f"seamless/tokens/masked_as_{reason}" for reason in ("stale", "pivot", "rejected"))
NOT_TRAINING = ("timing_s/testing", "timing_s/save_checkpoint")
LOGGED = {
    "reward": "critic/score/mean",
    "staleness_mean": f"{STALENESS}/mean",
    "staleness_max": f"{STALENESS}/max",
    "own_idle": "seamless/device/idle_share",
}
TIMES = {
    "wait_s": "timing_s/gen",
    "update_s": "timing_s/update_actor",
    "weights_s": "timing_s/update_weights",
    "lent_s": "timing_s/switch_wait",
}
"""Parts of a step: the wait for samples, the actor's updates, weights to the engines, a trainer's device generating."""
LAST = 3  # validations, or that many times as many steps, whose mean reward is what a run has learned
TRAINED_LAST = 5  # steps, where nothing was validated
QUANTILES = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 10: 2.23, 15: 2.13, 30: 2.04}
"""Student's t, two-sided 95%, by degrees of freedom; for those between, the next lower ones."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class StepFigures:
    """A step: seconds since the run's start at its end, its own seconds, response tokens trained, samples so far.

    `seconds` are from the end of the step before, `training_s` these without its validation and its checkpoint.
    `validation` is the mean reward of the metrics that `validation_of` names. `idle` is the devices' idle share as seen
    from outside, `own_idle` as the seamless trainer's ledger has it. The last four are of `TIMES`, None where a mode
    logs no such time.
    """

    step: int
    at_s: float
    seconds: float | None
    training_s: float | None
    tokens: float
    samples: int
    reward: float | None
    validation: float | None
    validation_of: str
    staleness_mean: float | None
    staleness_max: float | None
    dropped_tokens: float
    idle: float | None
    own_idle: float | None
    wait_s: float | None
    update_s: float | None
    weights_s: float | None
    lent_s: float | None


@dataclass(frozen=True)
class RunFigures:
    """A run after its first steps.

    `training_s`, and the tokens/s that follow from it, are without validations and checkpoints; all other times are
    with them. `staleness_updates` is the highest staleness in optimizer updates, at the last update of a step, and
    `staleness_updates_mean` the mean over samples and over the updates of a step. `dropped_share` is of the tokens that
    were trained or dropped, the first steps' among them. The last four are medians of steps.
    """

    tokens_per_s: float
    training_tokens_per_s: float
    step_s: float
    idle: float | None
    own_idle: float | None
    staleness_mean: float | None
    staleness_max: float | None
    staleness_updates: float | None
    staleness_updates_mean: float | None
    dropped_tokens: float
    dropped_share: float
    reward: float | None
    reward_of: str
    start_s: float
    seconds: float
    training_s: float
    tokens: float
    wait_s: float | None
    update_s: float | None
    weights_s: float | None
    lent_s: float | None


@dataclass(frozen=True)
class StepSize:
    """What a step of an arm is: samples, sessions of a group, and optimizer steps."""

    samples: int
    group: int
    updates: int


def step_figures(
    steps: Sequence[Row], size: StepSize, idle: Callable[[float, float], float | None]
) -> list[StepFigures]:
    """The steps in order, a validation before the first as step 0; `idle` gives the share between two times."""
    found: list[StepFigures] = []
    before: float | None = None
    rows = dict[int, StepRow]()
    for logged in steps:
        add_row(rows, StepRow(int(logged["step"]), float(logged["at"]), logged["data"]))
    for step in sorted(rows):
        at, row = rows[step].time, rows[step].metrics
        seconds = None if before is None or step == 0 else at - before
        validation, validation_of = validation_reward(row)
        found.append(
            StepFigures(
                step=step,
                at_s=at,
                seconds=seconds,
                training_s=None if seconds is None else max(0.0, seconds - total(NOT_TRAINING, row)),
                tokens=response_tokens(row),
                samples=step * size.samples,
                validation=validation,
                validation_of=validation_of,
                dropped_tokens=dropped_tokens(row, size),
                idle=None if before is None else idle(before, at),
                **{name: number(row, metric) for name, metric in (LOGGED | TIMES).items()},
            )
        )
        before = at
    return found


def run_figures(steps: Sequence[StepFigures], size: StepSize, *, skip: int, idle: float | None) -> RunFigures:
    """The figures of a run; `idle` is its devices' share after the first steps. ConfigError if `skip` leaves none."""
    check_skip(skip, max((step.step for step in steps), default=0))
    kept = [step for step in steps if step.step > skip and step.seconds is not None]
    seconds = [step.seconds for step in kept if step.seconds is not None]
    training_s, tokens = sum(step.training_s or 0.0 for step in kept), sum(step.tokens for step in kept)
    oldest = of_known(max, (step.staleness_max for step in kept))
    staleness = of_known(mean, (step.staleness_mean for step in kept))
    dropped, trained = sum(step.dropped_tokens for step in steps), sum(step.tokens for step in steps)
    reward, reward_of = learned(steps)
    own = [(step.own_idle * step.seconds, step.seconds) for step in kept if step.own_idle is not None and step.seconds]
    return RunFigures(
        tokens_per_s=tokens / sum(seconds),
        training_tokens_per_s=tokens / training_s if training_s else 0.0,
        step_s=median(seconds),
        idle=idle,
        own_idle=sum(idle_s for idle_s, _ in own) / sum(step_s for _, step_s in own) if own else None,
        staleness_mean=staleness,
        staleness_max=oldest,
        staleness_updates=None if oldest is None else oldest * size.updates + size.updates - 1,
        staleness_updates_mean=None if staleness is None else staleness * size.updates + (size.updates - 1) / 2,
        dropped_tokens=dropped,
        dropped_share=dropped / (dropped + trained) if dropped + trained else 0.0,
        reward=reward,
        reward_of=reward_of,
        start_s=next(step.at_s for step in steps if step.step > 0),
        seconds=sum(seconds),
        training_s=training_s,
        tokens=tokens,
        **{name: of_known(median, (getattr(step, name) for step in kept)) for name in TIMES},
    )


def seconds_so_far(steps: Sequence[StepFigures], *, validations: bool = True) -> dict[int, float]:
    """By step: the seconds of all steps since the end of the first one, with validations and checkpoints or without."""
    found, so_far = dict[int, float](), 0.0
    for step in steps:
        if step.step > 0:
            seconds = step.seconds if validations else step.training_s
            so_far += (seconds or 0.0) if found else 0.0
            found[step.step] = so_far
    return found


def rewards_of(steps: Sequence[StepFigures]) -> tuple[list[tuple[StepFigures, float]], int, str]:
    """The rewards by step that say what a run has learned, over how many of them the mean is taken, and its words.

    Those are its validations, or its trained samples where it did not validate so often.
    """
    made = [step for step in steps if step.step > 0]
    validated = [(step, step.validation) for step in made if step.validation is not None]
    if len(validated) >= LAST:
        return validated, LAST, f"the last {LAST} validations, each {validated[-1][0].validation_of}"
    trained = [(step, step.reward) for step in made if step.reward is not None]
    return trained, TRAINED_LAST, f"the samples of the last {TRAINED_LAST} steps"


def learned(steps: Sequence[StepFigures]) -> tuple[float | None, str]:
    """What a run has learned, and of what it is the mean: of its last validations, or of its last steps' samples."""
    rewards, window, words = rewards_of(steps)
    return (mean(reward for _, reward in rewards[-window:]) if rewards else None), words


def check_skip(skip: int, steps: int) -> None:
    """ConfigError unless a measured step is left, and one before it: the first step's beginning is not logged."""
    if not 1 <= skip < steps:
        way_out = f"Give --skip from 1 to {steps - 1}" if steps > 1 else "Give --steps 2 or more"
        raise ConfigError("--skip", skip, f"of {steps} steps, none can be measured", way_out)


def dropped_tokens(row: Row, size: StepSize) -> float:
    """Response tokens that were not trained: dropped groups at the step's mean length, and tokens masked one by one."""
    return total(DROPPED_GROUPS, row) * size.group * (number(row, RESPONSE) or 0.0) + total(MASKED, row)


def number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else None


def total(names: Iterable[str], row: Row) -> float:
    """The sum of the metrics that a step has."""
    return sum(number(row, name) or 0.0 for name in names)


def of_known(fold: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """The mean, the median or the highest of the values that there are; None without any."""
    found = [value for value in values if value is not None]
    return fold(found) if found else None


@dataclass(frozen=True)
class Spread:
    """The median of some values, the lowest and the highest of them."""

    median: float
    lowest: float
    highest: float
    values: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of the values that there are; None without any."""
        found = [value for value in values if value is not None]
        return cls(median(found), min(found), max(found), len(found)) if found else None


@dataclass(frozen=True)
class RewardTest:
    """The reward of an arm less that of the baseline, and half the width of the difference's 95% interval.

    By Welch's t test (B. L. Welch, Biometrika 34, 1947): there are few runs, and their variances differ. The two are
    within noise when zero is in the interval.
    """

    difference: float
    half_width: float

    @property
    def equal(self) -> bool:
        return abs(self.difference) <= self.half_width

    @classmethod
    def of(cls, own: Sequence[float], other: Sequence[float]) -> RewardTest | None:
        """Of the rewards of runs, those of the baseline last; None where either has no two, and so no variance."""
        if min(len(own), len(other)) < 2:
            return None
        each = [(variance(rewards) / len(rewards), len(rewards) - 1) for rewards in (own, other)]
        both = sum(of_mean for of_mean, _ in each)
        freedom = both**2 / sum(of_mean**2 / runs for of_mean, runs in each) if both else 1.0
        quantile = QUANTILES[max(known for known in QUANTILES if known <= max(freedom, 1) + 1e-9)]
        return cls(mean(own) - mean(other), quantile * sqrt(both))
