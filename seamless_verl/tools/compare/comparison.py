"""What came of a comparison: the runs of each arm, what is known of arms before, and what follows in pairs. Pure.

Every run that was asked for has one state. A pair are two runs of the same seed and round, which were made close to
each other in time; a ratio is of such a pair, so that a machine whose speed drifts changes both alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from typing import Any

from seamless_verl.runtime.sample_lengths import RecordedLengths
from seamless_verl.tools.compare.budget import Difference
from seamless_verl.tools.compare.equal_tokens import EqualTokens
from seamless_verl.tools.compare.figures import RewardTest, RunFigures, Spread, StepFigures
from seamless_verl.tools.compare.forced_work import ForcedWork
from seamless_verl.tools.compare.lengths import LengthBias

Pair = tuple[int, int]
"""Seed and round."""
SPREADS = tuple(one.name for one in fields(RunFigures) if one.name != "reward_of")
RATIOS = (
    *("tokens_per_s", "training_tokens_per_s", "step_s", "seconds", "idle", "staleness_mean", "staleness_updates"),
    "reward",
)
OF_A_WHOLE_RUN = ("seconds", "reward")


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
class ArmFacts:
    """An arm before it runs: its baseline, and what it permits.

    `permitted` is staleness in weight versions: None where nothing bounds it, as in an asynchronous mode of verl's that
    does not drop what is too old, and for an arm that cannot run here. `rate` is its learning rate where there are
    several, `system` its name without that, and `line` its name without what it permits, where `--staleness` gave that.
    `shipped_poll`: it looks for finished prompts as often as verl ships it.
    """

    baseline: str
    permitted: int | None = None
    rate: str = ""
    system: str = ""
    line: str = ""
    shipped_poll: bool = False


@dataclass(frozen=True)
class ArmSummary:
    """An arm over its runs; a ratio is to the baseline, in pairs.

    `spreads` are of the figures of `RunFigures` that a run has, `ratios` of those of RATIOS that both runs of a pair
    have, none for the baseline itself. `steps` are those of its runs: with another number than the baseline's nothing
    is compared that grows with them. `reasons` say why runs did not finish, with their logs, each once.
    """

    arm: str
    finished: int
    runs: int
    steps: int
    spreads: Mapping[str, Spread]
    ratios: Mapping[str, Spread]
    reward_of: str
    reward_test: RewardTest | None
    reasons: tuple[tuple[str, str], ...]

    def __getattr__(self, name: str) -> Spread | None:
        """A figure of `RunFigures`; None where no run has it."""
        if name not in SPREADS:
            raise AttributeError(name)
        return self.spreads.get(name)

    @property
    def ratio(self) -> Spread | None:
        """Of tokens/s."""
        return self.ratios.get("tokens_per_s")


@dataclass(frozen=True)
class Comparison:
    """All that a report says. `conditions` are lines about machine, job and budget; `command` makes it again.

    `baseline` is the first arm that can run here; with several learning rates an arm's own one is that of its rate, in
    `arms`. `differences` are the settings in which an arm differs from the baseline, by the names of the arms that can
    run. `target_reward` is what the user asked for, None for the baseline's. `warnings` were known before any run.
    `idle_unknown` says why the devices cannot be seen from outside, where they cannot. `forced_work` is there for a
    workload.
    """

    title: str
    baseline: str
    runs: tuple[Run, ...]
    steps: int
    skip: int
    conditions: tuple[str, ...]
    command: str
    differences: Mapping[str, Sequence[Difference]] = field(default_factory=dict)
    interrupted: bool = False
    equal_tokens: EqualTokens | None = None
    arms: Mapping[str, ArmFacts] = field(default_factory=dict)
    target_reward: float | None = None
    warnings: tuple[str, ...] = ()
    idle_unknown: str = ""
    forced_work: ForcedWork | None = None

    @property
    def names(self) -> list[str]:
        """The arms, in the order in which they first ran."""
        return list(dict.fromkeys(run.arm for run in self.runs))

    @cached_property
    def summaries(self) -> list[ArmSummary]:
        return [self._summary(arm) for arm in self.names]

    @property
    def baselines(self) -> list[str]:
        """The baselines of all arms, each once."""
        return list(dict.fromkeys(map(self.baseline_of, self.names)))

    @property
    def validates(self) -> bool:
        """Whether a finished run validated, or saved, so that its times with that and without it differ."""
        finished = (run for run in self.runs if run.figures is not None)
        return any(step.training_s != step.seconds for run in finished for step in run.steps)

    @property
    def even(self) -> bool:
        """Whether all finished runs made as many steps, so that what they have learned in the end can be compared."""
        return len({run.steps[-1].step for run in self.runs if run.figures is not None}) <= 1

    def baseline_of(self, arm: str) -> str:
        return self.arms[arm].baseline if arm in self.arms else self.baseline

    def finished(self, arm: str) -> dict[Pair, Run]:
        """An arm's finished runs by seed and round."""
        return {run.pair: run for run in self.runs if run.arm == arm and run.figures is not None}

    def figures_of(self, arm: str) -> dict[Pair, RunFigures]:
        """Of an arm's finished runs, by seed and round."""
        return {pair: run.figures for pair, run in self.finished(arm).items() if run.figures is not None}

    def _summary(self, arm: str) -> ArmSummary:
        """An arm, compared with its baseline."""
        baseline, runs = self.baseline_of(arm), [run for run in self.runs if run.arm == arm]
        own, base = self.figures_of(arm), self.figures_of(baseline)
        steps, others = (self._last_step(name) for name in (arm, baseline))
        ratios = {
            name: spread
            for name in RATIOS
            if arm != baseline
            and (steps == others or name not in OF_A_WHOLE_RUN)
            and (spread := Spread.of(pair_ratios(name, own, base))) is not None
        }
        spreads = {name: Spread.of(getattr(one, name) for one in own.values()) for name in SPREADS}
        rewards = [[one.reward for one in of.values() if one.reward is not None] for of in (own, base)]
        failed = [run for run in runs if run.state in (RunState.FAILED, RunState.REFUSED)]
        return ArmSummary(
            arm=arm,
            finished=len(own),
            runs=len(runs),
            steps=steps,
            spreads={name: spread for name, spread in spreads.items() if spread is not None},
            ratios=ratios,
            reward_of=next((one.reward_of for one in own.values()), ""),
            reward_test=RewardTest.of(*rewards) if steps == others and arm != baseline else None,
            reasons=tuple(dict.fromkeys((run.reason, run.log) for run in failed)),
        )

    def _last_step(self, arm: str) -> int:
        """How many steps an arm's finished runs made; 0 where there is none."""
        return max((run.steps[-1].step for run in self.finished(arm).values()), default=0)


def pair_ratios(figure: str, own: Mapping[Pair, RunFigures], base: Mapping[Pair, RunFigures]) -> list[float]:
    """A figure of an arm over the baseline's, in each pair where both have it and the baseline's is not 0."""
    both = ((getattr(own[pair], figure), getattr(base[pair], figure)) for pair in own if pair in base)
    return [value / other for value, other in both if value is not None and other]
