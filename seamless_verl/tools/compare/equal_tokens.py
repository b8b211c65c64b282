"""What each arm has learned after the same number of generated tokens: methods that sample differently, compared. Pure.

Samplers and estimators give prompts different numbers of samples, and drop some of these. So a step of one method is
not as much work as a step of another, and they are compared at equal tokens. Tokens are all that the engines generated
to train on, also those of samples that were dropped, and not those of validations. The number at which arms are
compared, T, is that of the run that generated the fewest. A run's reward and seconds at T lie on straight lines
between two points that it logged. Rewards are of validations: those of trained samples are of the prompts that
the method chose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from seamless_verl.tools.compare.figures import StepFigures, mean_or_none, number, seconds_so_far
from seamless_verl.tools.compare.outcome import Run
from seamless_verl.tools.compare.statistics import RewardTest, Spread

GENERATED, VALIDATING = "calls/tokens", "calls/validation_tokens"
"""Tokens of all calls, and of those of validations, since the data plane was started.

A data plane that Ray starts again begins with 0.
"""
SAMPLES_OF = "seamless/sampler/samples_of"
LEVELS = ("none", "hard", "middle", "easy")
"""Of groups, as samplers name them: by the share of right answers 0, up to 1/4, up to 3/4, above."""
Logged = Mapping[str, Any]


@dataclass(frozen=True)
class RunAtTokens:
    """A run after T generated tokens: seconds since the end of its first step, and response tokens trained.

    `training_s` are the seconds without validations, of which arms may make different numbers.
    `samples` has the mean size of groups by level of `LEVELS`, over the run's steps; None where it had no such group.
    """

    reward: float | None
    seconds: float
    training_s: float
    trained: float
    samples: Mapping[str, float | None]


@dataclass(frozen=True)
class ArmAtTokens:
    """An arm's runs after T tokens; `reward_test` is its difference to the baseline."""

    arm: str
    reward: Spread | None
    reward_test: RewardTest | None
    seconds: Spread | None
    training_s: Spread | None
    trained: Spread | None
    samples: Mapping[str, float | None]


@dataclass(frozen=True)
class EqualTokens:
    """All arms after `tokens` generated tokens."""

    tokens: float
    arms: tuple[ArmAtTokens, ...]


def at_equal_tokens(
    runs: Sequence[Run],
    logged: Mapping[tuple[str, int, int], Sequence[Logged]],
    groups: Mapping[str, int],
    baseline: str,
) -> EqualTokens | None:
    """The arms at the tokens of the run that generated the fewest; None before a run has finished.

    Args:
        logged: what each finished run logged, by arm, seed and round.
        groups: by arm, the samples of a prompt where no sampler says otherwise.
    """
    finished = [run for run in runs if run.figures is not None]
    if not finished:
        return None
    generated = {run.key: generated_tokens(logged[run.key]) for run in finished}
    tokens = min(series[-1] for series in generated.values())
    found: dict[str, list[RunAtTokens]] = {run.arm: [] for run in runs}
    for run in finished:
        key = run.key
        found[run.arm].append(run_at(tokens, run.steps, generated[key], logged[key], groups[run.arm]))
    base = found.get(baseline, [])
    return EqualTokens(tokens, tuple(arm_at(arm, ones, base, arm == baseline) for arm, ones in found.items()))


def generated_tokens(logged: Sequence[Logged]) -> list[float]:
    """The tokens generated to train on until each step's end.

    A step that does not say so, as a first validation, added none. The count begins again with a data plane. Of several
    shards it is the sum: where one of them began again, what the others had is counted twice.
    """
    total, last, found = 0.0, (0.0, 0.0), list[float]()
    for step in logged:
        generated, validating = number(step["data"], GENERATED), number(step["data"], VALIDATING) or 0.0
        if generated is not None:
            began_again = generated < last[0] or validating < last[1]
            before = (0.0, 0.0) if began_again else last
            total += (generated - before[0]) - (validating - before[1])
            last = generated, validating
        found.append(total)
    return found


def run_at(
    tokens: float, steps: Sequence[StepFigures], generated: Sequence[float], logged: Sequence[Logged], group: int
) -> RunAtTokens:
    """A run after so many tokens; `generated` are those until the end of each of its steps."""
    trained = accumulate(step.tokens for step in steps)
    points = list(zip(generated, steps, strict=True))
    seconds, training_s = (
        [(at, so_far[step.step]) for at, step in points if step.step > 0]
        for so_far in (seconds_so_far(steps), seconds_so_far(steps, validations=False))
    )
    return RunAtTokens(
        reward=on_line(tokens, [(at, step.validation) for at, step in points if step.validation is not None]),
        seconds=on_line(tokens, seconds) or 0.0,
        training_s=on_line(tokens, training_s) or 0.0,
        trained=on_line(tokens, list(zip(generated, trained, strict=True))) or 0.0,
        samples=samples_of(logged, group),
    )


def on_line(at: float, points: Sequence[tuple[float, float]]) -> float | None:
    """The value at `at` on the straight lines between points, in their order; beyond them, the nearest one's."""
    if not points:
        return None
    if at <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if at <= right:
            return high if right == left else low + (high - low) * (at - left) / (right - left)
    return points[-1][1]


def samples_of(logged: Sequence[Logged], group: int) -> dict[str, float | None]:
    """The mean size of a run's groups by level; without a sampler every group has `group` samples."""
    rows = [step["data"] for step in logged]
    named = {level: f"{SAMPLES_OF}/{level}" for level in LEVELS}
    if not any(name in row for row in rows for name in named.values()):
        return dict.fromkeys(LEVELS, float(group))
    return {level: mean_or_none(number(row, name) for row in rows) for level, name in named.items()}


def arm_at(arm: str, runs: Sequence[RunAtTokens], baseline: Sequence[RunAtTokens], is_baseline: bool) -> ArmAtTokens:
    rewards, others = ([run.reward for run in ones if run.reward is not None] for ones in (runs, baseline))
    return ArmAtTokens(
        arm=arm,
        reward=Spread.of(rewards),
        reward_test=None if is_baseline else RewardTest.of(rewards, others),
        seconds=Spread.of(run.seconds for run in runs),
        training_s=Spread.of(run.training_s for run in runs),
        trained=Spread.of(run.trained for run in runs),
        samples={level: mean_or_none(run.samples[level] for run in runs) for level in LEVELS},
    )
