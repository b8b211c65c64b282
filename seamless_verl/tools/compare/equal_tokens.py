"""What each arm has learned after the same number of generated tokens: methods that sample differently, compared. Pure.

A step of one method is not as much work as a step of another. Tokens are all that engines generated to train on,
dropped samples included and validations not. Arms are compared at those of the run that generated the fewest; rewards
and seconds lie on straight lines between two points that a run logged. Rewards are of validations: trained samples are
of the prompts that a method chose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import mean
from typing import Any

import numpy as np

from seamless_verl.tools.compare.figures import RewardTest, Spread, StepFigures, number, of_known, seconds_so_far

GENERATED, VALIDATING = "calls/tokens", "calls/validation_tokens"
"""Tokens of all calls, and of those of validations, since the data plane was started; a new one begins with 0."""
SAMPLES_OF = "seamless/sampler/samples_of"
LEVELS = ("none", "hard", "middle", "easy")
"""Of groups, as samplers name them: by the share of right answers 0, up to 1/4, up to 3/4, above."""
Logged = Sequence[Mapping[str, Any]]
Key = tuple[str, int, int]
"""Arm, seed and round of a run."""


@dataclass(frozen=True)
class ArmAtTokens:
    """An arm's runs after so many tokens; `reward_test` is its difference to the baseline.

    `seconds` are since the end of the first step, `training_s` without validations; `trained` are response tokens.
    `samples` has the mean size of groups by level of `LEVELS`, over steps and runs; None where there was no such group.
    """

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
    steps: Mapping[Key, Sequence[StepFigures]],
    logged: Mapping[Key, Logged],
    groups: Mapping[str, int],
    arms: Iterable[str],
    baseline: str,
) -> EqualTokens | None:
    """The arms at the tokens of the finished run that generated the fewest; None where none finished.

    `steps` are of the finished runs, and `groups` the samples of a prompt by arm, where no sampler says otherwise.
    """
    generated = {key: generated_tokens(logged[key]) for key in steps}
    tokens = min((series[-1] for series in generated.values()), default=None)
    if tokens is None:
        return None
    at, found = {key: run_at(tokens, steps[key], generated[key]) for key in steps}, []
    base = [run["reward"] for key, run in at.items() if key[0] == baseline and run["reward"] is not None]
    for arm in arms:
        runs = {key: run for key, run in at.items() if key[0] == arm}
        rewards = [run["reward"] for run in runs.values() if run["reward"] is not None]
        sizes = [group_sizes(logged[key], groups[arm]) for key in runs]
        spreads = {name: Spread.of(run[name] for run in runs.values()) for name in ("seconds", "training_s", "trained")}
        samples = {level: of_known(mean, (of[level] for of in sizes)) for level in LEVELS}
        test = None if arm == baseline else RewardTest.of(rewards, base)
        found.append(ArmAtTokens(arm, Spread.of(rewards), test, **spreads, samples=samples))
    return EqualTokens(tokens, tuple(found))


def generated_tokens(logged: Logged) -> list[float]:
    """The tokens generated to train on until each step's end.

    A step that does not say so, as a first validation, added none. The count begins again with a data plane. Of several
    shards it is the sum: where one of them began again, what the others had is counted twice.
    """
    total, last, found = 0.0, (0.0, 0.0), list[float]()
    for step in logged:
        generated, validating = number(step["data"], GENERATED), number(step["data"], VALIDATING) or 0.0
        if generated is not None:
            before = (0.0, 0.0) if generated < last[0] or validating < last[1] else last
            total += (generated - before[0]) - (validating - before[1])
            last = generated, validating
        found.append(total)
    return found


def run_at(tokens: float, steps: Sequence[StepFigures], generated: Sequence[float]) -> dict[str, float | None]:
    """A run's reward, seconds and trained tokens after so many; `generated` are those until the end of each step."""
    points = list(zip(generated, steps, strict=True))
    all_s, training_s = seconds_so_far(steps), seconds_so_far(steps, validations=False)
    trained = accumulate(step.tokens for step in steps)
    return {
        "reward": on_line(tokens, [(at, step.validation) for at, step in points if step.validation is not None]),
        "seconds": on_line(tokens, [(at, all_s[step.step]) for at, step in points if step.step > 0]),
        "training_s": on_line(tokens, [(at, training_s[step.step]) for at, step in points if step.step > 0]),
        "trained": on_line(tokens, list(zip(generated, trained, strict=True))),
    }


def on_line(at: float, points: Sequence[tuple[float, float]]) -> float | None:
    """The value at `at` on the straight lines between points, in their order; beyond them, the nearest one's."""
    return float(np.interp(at, *zip(*points, strict=True))) if points else None


def group_sizes(logged: Logged, group: int) -> dict[str, float | None]:
    """The mean size of a run's groups by level; without a sampler every group has `group` samples."""
    rows = [step["data"] for step in logged]
    if not any(f"{SAMPLES_OF}/{level}" in row for row in rows for level in LEVELS):
        return dict.fromkeys(LEVELS, float(group))
    return {level: of_known(mean, (number(row, f"{SAMPLES_OF}/{level}") for row in rows)) for level in LEVELS}
