"""Validation rewards of an arm's runs, and whether two arms differ by more than their seeds do. Pure.

A validation curve is the mean reward by step. What of a step's metrics is a reward, of how many validations the mean is
what a run has learned, and whether two arms are within noise is decided in `seamless_verl.tools.compare`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from seamless_verl.runtime.step_metrics import validation_reward
from seamless_verl.runtime.tables import text_table
from seamless_verl.tools.compare.figures import LAST
from seamless_verl.tools.compare.outcome import RewardTest
from seamless_verl.tools.compare.statistics import MeanOfRuns

MAX_NAME = 24  # characters of an arm's name above its column
ValidationCurve = Mapping[int, float]
ArmCurves = Mapping[str, Sequence[ValidationCurve]]


def learned_rewards(validation_curves: Sequence[ValidationCurve]) -> MeanOfRuns:
    """What an arm has learned, over its runs."""
    return MeanOfRuns.of([learned_reward(validation_curve) for validation_curve in validation_curves])


def learned_reward(validation_curve: ValidationCurve) -> float:
    """The mean of the last validations after an update."""
    return mean(validation_curve[step] for step in sorted(set(validation_curve) - {0})[-LAST:])


def read_validation_curve(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The validation curve in verl's file log, rows of {"step", "data"}; the later row of a step counts."""
    validation_curve = dict[int, float]()
    for row in rows:
        reward, _ = validation_reward(row["data"])
        if reward is not None:
            validation_curve[int(row["step"])] = reward
    return validation_curve


def report_lines(arms: ArmCurves) -> Iterator[str]:
    """The steps at which all runs validated as a table, then what each arm has learned, compared with the first."""
    heads = list(arms) if max(map(len, arms)) <= MAX_NAME else [f"[{number}]" for number in range(1, len(arms) + 1)]
    yield from (f"{head} {name}" for head, name in zip(heads, arms, strict=True) if head != name)
    header, *rows = text_table(("step  ", *heads), _rows(arms), align="<>").splitlines()
    yield f"{header}   (mean over seeds, lowest-highest below)"
    yield from rows
    (baseline, learned), *others = ((name, learned_rewards(curves)) for name, curves in arms.items())
    yield f"{baseline}: {learned.mean:.3f} in the last {LAST} validations"
    for name, other in others:
        test = RewardTest(*other.difference(learned))
        verdict = f"{test.difference:+.3f} +- {test.half_width:.3f} (95%) to {baseline}"
        yield f"{name}: {other.mean:.3f}, {verdict}: {'within noise' if test.equal else 'differs'}"


def _rows(arms: ArmCurves) -> Iterator[tuple[str, ...]]:
    """Two rows for each step: the mean over seeds, and the range."""
    all_steps = [set(validation_curve) for curves in arms.values() for validation_curve in curves]
    for step in sorted(set.intersection(*all_steps)):
        of_arms = [[validation_curve[step] for validation_curve in curves] for curves in arms.values()]
        yield f"{step:4}", *(f"{mean(rewards):.3f}" for rewards in of_arms)
        yield "", *(f"{min(rewards):.3f}-{max(rewards):.3f}" for rewards in of_arms)
