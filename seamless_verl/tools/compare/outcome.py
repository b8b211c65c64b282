"""What came of a comparison: the runs of each arm, and what follows from them in pairs. Pure.

Every run that was asked for has one state. A pair are two runs of the same seed and round, which were made close to
each other in time; a ratio is of such a pair, so that a machine whose speed drifts changes both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from seamless_verl.runtime.sample_lengths import RecordedLengths
from seamless_verl.tools.compare.figures import RunFigures, StepFigures
from seamless_verl.tools.compare.lengths import LengthBias
from seamless_verl.tools.compare.statistics import RewardTest, Spread, pair_ratios

Pair = tuple[int, int]
"""Seed and round."""


class RunState(StrEnum):
    """What became of a run."""

    FINISHED = "finished"
    """It made all of its steps."""
    FAILED = "failed"
    """It ended with an error, or not in time."""
    REFUSED = "refused"
    """Its settings cannot work here, and it was not started."""
    NOT_MADE = "not made"
    """The comparison was interrupted before or while it ran."""


@dataclass(frozen=True)
class Run:
    """One run of an arm; `figures` is there if it finished, `reason` and `log` say why it did not.

    `lengths` are those of its samples, and `bias` what follows from them, where the trainer wrote them down. `machine`
    is what is known of the one that it was made on.
    """

    arm: str
    seed: int
    round: int
    state: RunState
    steps: tuple[StepFigures, ...] = ()
    figures: RunFigures | None = None
    reason: str = ""
    log: str = ""
    lengths: RecordedLengths | None = None
    bias: LengthBias | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pair(self) -> Pair:
        return self.seed, self.round

    @property
    def key(self) -> tuple[str, int, int]:
        return self.arm, self.seed, self.round


@dataclass(frozen=True)
class ArmSummary:
    """An arm over its runs; a ratio is to the baseline, in pairs; None where no run has the figure."""

    arm: str
    finished: int
    runs: int
    spreads: Mapping[str, Spread]
    """Of the figures of `RunFigures` that a run has."""
    reward_of: str
    reward_test: RewardTest | None
    ratios: Mapping[str, Spread]
    """By the figures of RATIOS that both arms of a pair have; none for the baseline itself."""
    reasons: tuple[tuple[str, str], ...]
    """Why runs did not finish, and their logs, each once."""
    steps: int = 0
    """Of its runs; with another number than the baseline's nothing is compared that grows with them."""

    def __getattr__(self, name: str) -> Spread | None:
        """A figure of `RunFigures`."""
        if name not in SPREADS:
            raise AttributeError(name)
        return self.spreads.get(name)

    @property
    def ratio(self) -> Spread | None:
        """Of tokens/s."""
        return self.ratios.get("tokens_per_s")


def summarize(runs: Sequence[Run], baseline_of: Callable[[str], str]) -> list[ArmSummary]:
    """A summary of each arm, in the order in which they first come, compared with its baseline."""
    return [arm_summary(name, runs, baseline_of(name)) for name in dict.fromkeys(run.arm for run in runs)]


def arm_summary(name: str, runs: Sequence[Run], baseline: str) -> ArmSummary:
    own, base = figures_by_pair(runs, name), figures_by_pair(runs, baseline)
    found = list(own.values())
    failed = [run for run in runs if run.arm == name and run.state in (RunState.FAILED, RunState.REFUSED)]
    reasons = dict.fromkeys((run.reason, run.log) for run in failed)
    steps = last_step(runs, name)
    alike = steps == last_step(runs, baseline)
    comparable = [of for of in RATIOS if alike or of not in OF_A_WHOLE_RUN]
    ratios = {} if name == baseline else {of: Spread.of(ratios_of(of, own, base)) for of in comparable}
    rewards, others = ([one.reward for one in figures.values() if one.reward is not None] for figures in (own, base))
    spreads = {figure: Spread.of(getattr(run, figure) for run in found) for figure in SPREADS}
    return ArmSummary(
        arm=name,
        finished=len(found),
        runs=sum(run.arm == name for run in runs),
        spreads={figure: spread for figure, spread in spreads.items() if spread is not None},
        ratios={of: ratio for of, ratio in ratios.items() if ratio is not None},
        reward_of=found[0].reward_of if found else "",
        reward_test=RewardTest.of(rewards, others) if alike and name != baseline else None,
        reasons=tuple(reasons),
        steps=steps,
    )


SPREADS = {one.name for one in fields(RunFigures)} - {"reward_of"}
RATIOS = (
    *("tokens_per_s", "training_tokens_per_s", "step_s", "seconds", "idle", "staleness_mean", "staleness_updates"),
    "reward",
)
OF_A_WHOLE_RUN = ("seconds", "reward")


def last_step(runs: Sequence[Run], arm: str) -> int:
    """How many steps the finished runs of an arm made; 0 where there is none."""
    return max((run.steps[-1].step for run in runs if run.arm == arm and run.figures is not None), default=0)


def ratios_of(figure: str, own: Mapping[Pair, RunFigures], base: Mapping[Pair, RunFigures]) -> list[float]:
    """A figure of an arm over the baseline's, in each pair where both have it and the baseline's is not 0."""
    values, others = (
        {pair: value for pair, run in runs.items() if (value := getattr(run, figure)) is not None}
        for runs in (own, base)
    )
    return pair_ratios(values, others)


def figures_by_pair(runs: Sequence[Run], arm: str) -> dict[Pair, RunFigures]:
    """The figures of an arm's finished runs by seed and round."""
    return {run.pair: run.figures for run in runs if run.arm == arm and run.figures is not None}
