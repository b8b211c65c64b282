"""How long each run takes to a given reward: the baseline's at its end, or one that the user names. Pure.

The baseline's is that of its run of the same seed and round; of one that collapsed it is the highest that it had, for
what it is at the end is no reward to reach. With several learning rates it is the highest of theirs, so that all arms
have the same one. A run that does not reach it counts as later than all that do, and so does one that failed: in
medians, in ratios and in the choice of a learning rate. Arms whose runs make different numbers of steps have no target,
for the shorter ones had less time to reach it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from seamless_verl.tools.compare.comparison import Comparison
from seamless_verl.tools.compare.learning import RewardPoint, collapse, first_at, reward_points
from seamless_verl.tools.compare.outcome import Pair, RunState
from seamless_verl.tools.compare.statistics import Spread

MADE = (RunState.FINISHED, RunState.FAILED)
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
        return sum(point is None for point in self.reached.values())


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
        ratio=ratio_to(others, reached, with_validations),
        training_ratio=ratio_to(others, reached, without_validations),
    )


def places(comparison: Comparison, arm: str, goals: Mapping[Pair, float]) -> dict[Pair, RewardPoint | None]:
    """Where the arm's runs reached their targets: those that finished, and as None those that failed."""
    runs = [run for run in comparison.runs if run.arm == arm and run.state in MADE and run.pair in goals]
    return {run.pair: first_at(reward_points(run.steps), goals[run.pair]) for run in runs}


def with_validations(point: RewardPoint) -> float:
    return point.seconds


def without_validations(point: RewardPoint) -> float:
    return point.training_s


def ratio_to(baseline: Reached, arm: Reached, seconds: Callable[[RewardPoint], float]) -> Spread | None:
    """Of an arm's seconds to the baseline's, in pairs; None where no pair says anything."""
    ratios = []
    for pair in arm.keys() & baseline.keys():
        own, other = (math.inf if at is None else seconds(at) for at in (arm[pair], baseline[pair]))
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
            None if baseline is None or one is baseline else ratio_to(baseline.reached, one.reached, with_validations),
        )
        for system, one in best.items()
    ]
