"""What each arm has learned after the same number of generated tokens: methods that sample differently, compared. Pure.

Samplers and estimators give prompts different numbers of samples, and drop some of these, so that a step of one method
is not as much work as a step of another. Tokens are all that the engines generated to train on, also those of samples
that were dropped, and not those of validations. The number at which arms are compared, T, is that of the run that
generated the fewest. A run's reward and seconds at T lie on straight lines between two points that it logged. Rewards
are of validations: those of trained samples are of the prompts that the method chose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from seamless_verl.tools.compare.figures import mean_or_none, number, seconds_so_far
from seamless_verl.tools.compare.outcome import Run
from seamless_verl.tools.compare.statistics import RewardTest, Spread

GENERATED, VALIDATING = "calls/tokens", "calls/validation_tokens"
"""Tokens of all calls, and of those of validations, since the data plane was started; a new one begins with 0."""
SAMPLES_OF = "seamless/sampler/samples_of"
LEVELS = ("none", "hard", "middle", "easy")
"""Of groups, as samplers name them: by the share of right answers 0, up to 1/4, up to 3/4, above."""
Logged = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunAtTokens:
    """A run after T tokens: seconds since its first step's end, without validations, too, and response tokens trained.

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
    runs: Sequence[Run], logged: Mapping[tuple[str, int, int], Logged], groups: Mapping[str, int], baseline: str
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
        found[run.arm].append(run_at(tokens, run, generated[run.key], logged[run.key], groups[run.arm]))
    base = found.get(baseline, [])
    return EqualTokens(tokens, tuple(arm_at(arm, ones, base, arm == baseline) for arm, ones in found.items()))


def generated_tokens(logged: Logged) -> list[float]:
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


def run_at(tokens: float, run: Run, generated: Sequence[float], logged: Logged, group: int) -> RunAtTokens:
    """A run after so many tokens; `generated` are those until the end of each of its steps."""
    points = list(zip(generated, run.steps, strict=True))
    made = [(at, step) for at, step in points if step.step > 0]
    all_s, training_s = seconds_so_far(run.steps), seconds_so_far(run.steps, validations=False)
    trained = accumulate(step.tokens for step in run.steps)
    return RunAtTokens(
        reward=on_line(tokens, [(at, step.validation) for at, step in points if step.validation is not None]),
        seconds=on_line(tokens, [(at, all_s[step.step]) for at, step in made]) or 0.0,
        training_s=on_line(tokens, [(at, training_s[step.step]) for at, step in made]) or 0.0,
        trained=on_line(tokens, list(zip(generated, trained, strict=True))) or 0.0,
        samples=samples_of(logged, group),
    )


def on_line(at: float, points: Sequence[tuple[float, float]]) -> float | None:
    """The value at `at` on the straight lines between points, in their order; beyond them, the nearest one's."""
    return float(np.interp(at, *zip(*points, strict=True))) if points else None


def samples_of(logged: Logged, group: int) -> dict[str, float | None]:
    """The mean size of a run's groups by level; without a sampler every group has `group` samples."""
    rows = [step["data"] for step in logged]
    named = {level: f"{SAMPLES_OF}/{level}" for level in LEVELS}
    if not any(name in row for row in rows for name in named.values()):
        return dict.fromkeys(LEVELS, float(group))
    return {level: mean_or_none(number(row, name) for row in rows) for level, name in named.items()}


def arm_at(arm: str, runs: Sequence[RunAtTokens], baseline: Sequence[RunAtTokens], is_baseline: bool) -> ArmAtTokens:
    rewards, others = ([run.reward for run in ones if run.reward is not None] for ones in (runs, baseline))
    names = ("seconds", "training_s", "trained")
    return ArmAtTokens(
        arm=arm,
        reward=Spread.of(rewards),
        reward_test=None if is_baseline else RewardTest.of(rewards, others),
        **{name: Spread.of(getattr(run, name) for run in runs) for name in names},
        samples={level: mean_or_none(run.samples[level] for run in runs) for level in LEVELS},
    )
