"""What a run has learned, and when: its reward by samples and seconds, the time to a given one, and whether it fell.

A single validation, or a single step, has few samples. So a reward is the mean of the last `LAST` validations, or of
the samples of the last `TRAINED_LAST` steps where a run did not validate so often, and there is none before. Seconds
are those since the end of the first step. Validations and checkpoints are part of them: without these, which is given
besides, asynchronous modes would have untimed generation.

The reward to reach is the one that the baseline has at its end, in its run of the same seed and round, or one that the
user names; of a baseline that collapsed it is the highest that it had. With several learning rates it is the highest of
theirs, so that all arms have the same one. A run that does not reach it counts as later than all that do, and so does
one that failed: in medians, in ratios and in the choice of a learning rate. Arms whose runs make different numbers of
steps have no target, for the shorter ones had less time to reach it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from seamless_verl.tools.compare.comparison import Comparison
from seamless_verl.tools.compare.figures import LAST, TRAINED_LAST, StepFigures, seconds_so_far
from seamless_verl.tools.compare.outcome import Pair, RunState
from seamless_verl.tools.compare.statistics import Spread

FALLEN_TO = 0.5  # of its highest reward: a run that ends below has collapsed
MADE = (RunState.FINISHED, RunState.FAILED)


@dataclass(frozen=True)
class RewardPoint:
    """The reward of a run after a step: samples trained so far, seconds, and these without validations."""

    step: int
    samples: int
    seconds: float
    training_s: float
    reward: float


@dataclass(frozen=True)
class Collapse:
    """A run that fell: where its reward was highest, and what it is at the end."""

    best: RewardPoint
    end: RewardPoint


def reward_points(steps: Sequence[StepFigures]) -> list[RewardPoint]:
    """The reward after each step at which there is one; the last of them is what `figures.learned` says."""
    made = [step for step in steps if step.step > 0]
    validated = [(step, step.validation) for step in made if step.validation is not None]
    trained = [(step, step.reward) for step in made if step.reward is not None]
    values, window = (validated, LAST) if len(validated) >= LAST else (trained, TRAINED_LAST)
    seconds, training_s = seconds_so_far(steps), seconds_so_far(steps, validations=False)
    return [
        RewardPoint(
            step.step,
            step.samples,
            seconds[step.step],
            training_s[step.step],
            mean(reward for _, reward in values[end - window + 1 : end + 1]),
        )
        for end, (step, _) in enumerate(values)
        if end + 1 >= window
    ]


def first_at(points: Sequence[RewardPoint], target: float) -> RewardPoint | None:
    """Where the reward is first at least `target`; None if it never is."""
    return next((point for point in points if point.reward >= target), None)


def collapse(points: Sequence[RewardPoint]) -> Collapse | None:
    """Whether the reward at the end is below half of the run's highest; None if not, or if it never was above 0."""
    if not points:
        return None
    best, end = max(points, key=lambda point: point.reward), points[-1]
    return Collapse(best, end) if best.reward > 0 and end.reward < FALLEN_TO * best.reward else None


def collapses_of(comparison: Comparison, arm: str) -> dict[Pair, Collapse]:
    """The runs of an arm that collapsed."""
    runs = comparison.finished(arm).items()
    return {pair: fallen for pair, run in runs if (fallen := collapse(reward_points(run.steps))) is not None}


Reached = Mapping[Pair, RewardPoint | None]
"""Where runs reached their targets, by seed and round; None for one that did not, or failed."""


@dataclass(frozen=True)
class TimeToTarget:
    """When an arm's runs reached their targets.

    `seconds`, `training_s` (these without validations) and `samples` are medians over its runs, None when half of them
    or more did not reach it. Ratios are of seconds to the baseline's in pairs: infinite where the arm alone did not
    reach it, 0 where the baseline alone did not. A pair in which neither did says nothing, and is left out.
    """

    arm: str
    reached: Reached
    seconds: float | None
    training_s: float | None
    samples: float | None
    ratio: Spread | None
    training_ratio: Spread | None

    @property
    def times(self) -> dict[Pair, float]:
        return {pair: point.seconds for pair, point in self.reached.items() if point is not None}

    @property
    def missed(self) -> int:
        return len(self.reached) - len(self.times)


def targets(comparison: Comparison) -> dict[Pair, float]:
    """The reward to reach by seed and round; none where no baseline finished and the user names none.

    None either where runs made different numbers of steps.
    """
    if not comparison.even:
        return {}
    if comparison.target_reward is not None:
        pairs = {run.pair for run in comparison.runs if run.state in MADE}
        return dict.fromkeys(sorted(pairs), comparison.target_reward)
    found: dict[Pair, float] = {}
    for baseline in comparison.baselines:
        for pair, run in comparison.finished(baseline).items():
            if points := reward_points(run.steps):
                fallen = collapse(points)
                reward = points[-1].reward if fallen is None else fallen.best.reward
                found[pair] = max(found.get(pair, -math.inf), reward)
    return dict(sorted(found.items()))


def times_to_target(comparison: Comparison) -> list[TimeToTarget]:
    """For each arm with a run that has a target, in the order of the runs."""
    goals = targets(comparison)
    found = [time_of(comparison, arm, goals) for arm in dict.fromkeys(run.arm for run in comparison.runs)]
    return [one for one in found if one.reached]


def time_of(comparison: Comparison, arm: str, goals: Mapping[Pair, float]) -> TimeToTarget:
    reached, baseline = places(comparison, arm, goals), comparison.baseline_of(arm)
    others = {} if arm == baseline else places(comparison, baseline, goals)
    points = list(reached.values())
    return TimeToTarget(
        arm,
        reached,
        seconds=median_of_reached(None if at is None else at.seconds for at in points),
        training_s=median_of_reached(None if at is None else at.training_s for at in points),
        samples=median_of_reached(None if at is None else at.samples for at in points),
        ratio=ratio_to(others, reached, "seconds"),
        training_ratio=ratio_to(others, reached, "training_s"),
    )


def places(comparison: Comparison, arm: str, goals: Mapping[Pair, float]) -> dict[Pair, RewardPoint | None]:
    """Where the arm's runs reached their targets: those that finished, and as None those that failed."""
    runs = [run for run in comparison.runs if run.arm == arm and run.state in MADE and run.pair in goals]
    return {run.pair: first_at(reward_points(run.steps), goals[run.pair]) for run in runs}


def ratio_to(baseline: Reached, arm: Reached, seconds: str) -> Spread | None:
    """Of an arm's seconds to the baseline's, in pairs; None where no pair says anything."""
    ratios = []
    for pair in arm.keys() & baseline.keys():
        own, other = (math.inf if at is None else getattr(at, seconds) for at in (arm[pair], baseline[pair]))
        if own == other:  # of two that did not reach it nothing follows
            ratios += [1.0] if math.isfinite(own) else []
        else:
            ratios.append(own / other if other > 0 and math.isfinite(own) else math.inf)
    return Spread.of(ratios)


def median_of_reached(values: Iterable[float | None]) -> float | None:
    """The median, for which a missing value is larger than all others; None if it is missing, or there are none."""
    found = [math.inf if value is None else value for value in values]
    middle = median(found) if found else math.inf
    return middle if math.isfinite(middle) else None


@dataclass(frozen=True)
class BestRate:
    """A system at the learning rate at which it is fastest to the target; `ratio` to the baseline at its own."""

    system: str
    rate: str
    seconds: float
    ratio: Spread | None


def best_rates(comparison: Comparison) -> list[BestRate]:
    """Each system at its best rate; none without several rates, and none of a system that did not reach the target."""
    systems: dict[str, list[TimeToTarget]] = {}
    for one in times_to_target(comparison):
        facts = comparison.arms.get(one.arm)
        if facts is not None and facts.rate and one.seconds is not None:
            systems.setdefault(facts.system, []).append(one)
    best = {system: min(found, key=lambda one: one.seconds or 0.0) for system, found in systems.items()}
    first = comparison.arms.get(comparison.baseline)
    baseline = None if first is None else best.get(first.system)
    return [
        BestRate(
            system,
            comparison.arms[one.arm].rate,
            one.seconds or 0.0,
            None if baseline is None or one is baseline else ratio_to(baseline.reached, one.reached, "seconds"),
        )
        for system, one in best.items()
    ]
