"""How long each run takes to a given reward: the baseline's at its end, or one that the user names. Pure.

The baseline's is that of its run of the same seed and round. With several learning rates it is the highest of theirs,
so that all arms have the same one. A run that does not reach it counts as later than all that do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from seamless_verl.compare.comparison import Comparison
from seamless_verl.compare.learning import RewardPoint, first_at, reward_points
from seamless_verl.compare.outcome import Pair
from seamless_verl.compare.statistics import Spread, pair_ratios


@dataclass(frozen=True)
class TimeToTarget:
    """Where an arm's runs reached their targets, by seed and round; None for a run that did not.

    `seconds` and `samples` are medians over its runs, None when half of them or more did not reach it; `ratio` is of
    seconds to the baseline's, in the pairs where both reached it.
    """

    arm: str
    reached: Mapping[Pair, RewardPoint | None]
    seconds: float | None
    samples: float | None
    ratio: Spread | None

    @property
    def times(self) -> dict[Pair, float]:
        return {pair: point.seconds for pair, point in self.reached.items() if point is not None}

    @property
    def missed(self) -> int:
        return sum(point is None for point in self.reached.values())


def targets(comparison: Comparison) -> dict[Pair, float]:
    """The reward to reach by seed and round; none where no baseline finished and the user names none."""
    pairs = {run.pair for run in comparison.runs if run.figures is not None}
    if comparison.target_reward is not None:
        return dict.fromkeys(sorted(pairs), comparison.target_reward)
    found: dict[Pair, float] = {}
    for baseline in comparison.baselines:
        for pair, run in comparison.finished(baseline).items():
            if points := reward_points(run.steps):
                found[pair] = max(found.get(pair, -math.inf), points[-1].reward)
    return dict(sorted(found.items()))


def times_to_target(comparison: Comparison) -> list[TimeToTarget]:
    """For each arm with a finished run that has a target, in the order of the runs."""
    goals = targets(comparison)
    found = [time_of(comparison, arm, goals) for arm in dict.fromkeys(run.arm for run in comparison.runs)]
    return [one for one in found if one.reached]


def time_of(comparison: Comparison, arm: str, goals: Mapping[Pair, float]) -> TimeToTarget:
    reached = places(comparison, arm, goals)
    times = {pair: point.seconds for pair, point in reached.items() if point is not None}
    baseline = comparison.baseline_of(arm)
    others = {pair: at.seconds for pair, at in places(comparison, baseline, goals).items() if at is not None}
    return TimeToTarget(
        arm,
        reached,
        seconds=median_of_reached(None if at is None else at.seconds for at in reached.values()),
        samples=median_of_reached(None if at is None else at.samples for at in reached.values()),
        ratio=None if arm == baseline else Spread.of(pair_ratios(times, others)),
    )


def places(comparison: Comparison, arm: str, goals: Mapping[Pair, float]) -> dict[Pair, RewardPoint | None]:
    runs = comparison.finished(arm)
    return {pair: first_at(reward_points(run.steps), goals[pair]) for pair, run in runs.items() if pair in goals}


def median_of_reached(values: Iterable[float | None]) -> float | None:
    """The median, for which a missing value is larger than all others; None if it is missing, or there are none."""
    found = [math.inf if value is None else value for value in values]
    middle = median(found) if found else math.inf
    return middle if math.isfinite(middle) else None


@dataclass(frozen=True)
class BestRate:
    """A system at the learning rate at which it is fastest to the target; `ratio` to the baseline at its own."""

    system: str
    arm: str
    rate: str
    seconds: float
    ratio: Spread | None


def best_rates(comparison: Comparison) -> list[BestRate]:
    """Each system at its best rate; none without several rates, and none of a system that did not reach the target."""
    by_arm = {one.arm: one for one in times_to_target(comparison) if one.seconds is not None}
    systems: dict[str, list[TimeToTarget]] = {}
    for arm, facts in comparison.arms.items():
        if facts.rate and arm in by_arm:
            systems.setdefault(facts.system, []).append(by_arm[arm])
    best = {system: min(found, key=lambda one: one.seconds or 0.0) for system, found in systems.items()}
    baseline = best.get(comparison.arms[comparison.baseline].system) if comparison.baseline in comparison.arms else None
    return [
        BestRate(
            system,
            one.arm,
            comparison.arms[one.arm].rate,
            one.seconds or 0.0,
            None if baseline is None or one is baseline else Spread.of(pair_ratios(one.times, baseline.times)),
        )
        for system, one in best.items()
    ]
