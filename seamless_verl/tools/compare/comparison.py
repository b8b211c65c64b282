"""All that a report says: the runs of a comparison, and what is known of its arms before any run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seamless_verl.tools.compare.differences import Difference
from seamless_verl.tools.compare.equal_tokens import EqualTokens
from seamless_verl.tools.compare.forced_work import ForcedWork
from seamless_verl.tools.compare.outcome import ArmSummary, Pair, Run, summarize


@dataclass(frozen=True)
class ArmFacts:
    """An arm before it runs: its baseline, and what it permits.

    `permitted` is staleness in weight versions: None where nothing bounds it, as in an asynchronous mode of verl's that
    does not drop what is too old, and for an arm that cannot run here. `rate` is its learning rate where there are
    several, `system` its name without that, and `line` its name without what it permits, where `--staleness` gave that.
    `shipped_poll`: it looks for finished prompts as often as verl ships it.
    """

    baseline: str
    ours: bool = False
    permitted: int | None = None
    rate: str = ""
    system: str = ""
    line: str = ""
    shipped_poll: bool = False


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
    def summaries(self) -> list[ArmSummary]:
        return summarize(self.runs, self.baseline_of)

    @property
    def baselines(self) -> list[str]:
        """The baselines of all arms, each once."""
        return list(dict.fromkeys(self.baseline_of(run.arm) for run in self.runs))

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
