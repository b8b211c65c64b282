"""What a run has learned, and when: its reward by samples and seconds, where it reached one, whether it fell. Pure.

A single validation, or a single step, has few samples. So a reward is the mean of the last `LAST` validations, or of
the samples of the last `TRAINED_LAST` steps where a run did not validate so often, and there is none before.
Seconds are those since the end of the first step. Validations and checkpoints are part of them: without these, which is
given besides, asynchronous modes would have untimed generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from seamless_verl.tools.compare.figures import LAST, TRAINED_LAST, StepFigures

FALLEN_TO = 0.5  # of its highest reward: a run that ends below has collapsed


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


def seconds_so_far(steps: Sequence[StepFigures], *, validations: bool = True) -> dict[int, float]:
    """By step: the seconds of all steps since the end of the first one, with validations and checkpoints or without."""
    found, total = dict[int, float](), 0.0
    for step in steps:
        if step.step > 0:
            seconds = step.seconds if validations else step.training_s
            total += (seconds or 0.0) if found else 0.0
            found[step.step] = total
    return found


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
