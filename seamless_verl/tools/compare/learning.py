"""What a run has learned, and when: its reward by samples and seconds, the time to a given one, and whether it fell.

A reward is the mean of the last `LAST` validations, or of the samples of the last `TRAINED_LAST` steps, for a single
one has few samples; there is none before. The reward to reach is the baseline's at its end, in its run of the same seed
and round, or the highest that it had if it collapsed; with several learning rates the highest of theirs, so that all
arms have the same one. A run that does not reach it, or fails, counts as later than all that do. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from seamless_verl.tools.compare.comparison import Comparison, Pair, RunState
from seamless_verl.tools.compare.figures import Spread, StepFigures, rewards_of, seconds_so_far

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
    values, window, _ = rewards_of(steps)
    seconds, training_s = seconds_so_far(steps), seconds_so_far(steps, validations=False)
    return [
        RewardPoint(step.step, step.samples, seconds[step.step], training_s[step.step], mean(last))
        for end, (step, _) in enumerate(values, 1)
        if len(last := [reward for _, reward in values[max(0, end - window) : end]]) == window
    ]


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
    goals, found = targets(comparison), []
    for arm in comparison.names:
        reached, baseline = reached_by(comparison, arm, goals), comparison.baseline_of(arm)
        others = {} if arm == baseline else reached_by(comparison, baseline, goals)
        if reached:
            medians = dict[str, float | None]()
            for name in ("seconds", "training_s", "samples"):
                middle = median(figure_at(point, name) for point in reached.values())
                medians[name] = middle if math.isfinite(middle) else None
            ratios = [ratio_to(others, reached, name) for name in ("seconds", "training_s")]
            found.append(TimeToTarget(arm, reached, **medians, ratio=ratios[0], training_ratio=ratios[1]))
    return found


def reached_by(comparison: Comparison, arm: str, goals: Mapping[Pair, float]) -> Reached:
    """Where the arm's runs first reached their targets; None for those that did not, or failed."""
    return {
        run.pair: next((point for point in reward_points(run.steps) if point.reward >= goals[run.pair]), None)
        for run in comparison.runs
        if run.arm == arm and run.state in MADE and run.pair in goals
    }


def figure_at(point: RewardPoint | None, name: str) -> float:
    """A figure where a run reached its target; of one that did not it is larger than all others."""
    return math.inf if point is None else float(getattr(point, name))


def ratio_to(baseline: Reached, arm: Reached, seconds: str) -> Spread | None:
    """Of an arm's seconds to the baseline's, in pairs; None where no pair says anything."""
    ratios = []
    for pair in arm.keys() & baseline.keys():
        own, other = figure_at(arm[pair], seconds), figure_at(baseline[pair], seconds)
        if own == other:  # of two that did not reach it nothing follows
            ratios += [1.0] if math.isfinite(own) else []
        else:
            ratios.append(own / other if other > 0 and math.isfinite(own) else math.inf)
    return Spread.of(ratios)


@dataclass(frozen=True)
class BestRate:
    """A system at the learning rate at which it is fastest to the target; `ratio` to the baseline at its own."""

    system: str
    rate: str
    seconds: float
    ratio: Spread | None


def best_rates(comparison: Comparison) -> list[BestRate]:
    """Each system at its best rate; none without several rates, and none of a system that did not reach the target."""
    best = dict[str, TimeToTarget]()
    for one in sorted(times_to_target(comparison), key=lambda one: one.seconds or 0.0):
        facts = comparison.arms.get(one.arm)
        if facts is not None and facts.rate and one.seconds is not None:
            best.setdefault(facts.system, one)
    first = comparison.arms.get(comparison.baseline)
    baseline = None if first is None else best.get(first.system)
    return [
        BestRate(
            system,
            comparison.arms[best[system].arm].rate,
            best[system].seconds or 0.0,
            None
            if baseline is None or best[system] is baseline
            else ratio_to(baseline.reached, best[system].reached, "seconds"),
        )
        for system in dict.fromkeys(comparison.arms[arm].system for arm in comparison.names if arm in comparison.arms)
        if system in best
    ]
