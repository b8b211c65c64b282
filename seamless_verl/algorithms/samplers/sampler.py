"""What samplers know, see and decide, and their common base. Pure.

A *prompt* is a question of the data; a *group* is the samples that it gets in one visit. A sampler says how many
samples the next prompts get, and of each group that has ended whether it is trained, gets more samples first, or is
dropped. It changes nothing else, so that the trainer and the simulator run the same object.

Invariant: a result is added once, when its group's last sample has been judged; results are never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The outcomes of a group's samples, each from 0 (wrong) to 1 (right): their number, sum and sum of squares."""

    samples: int
    total: float
    squares: float

    @classmethod
    def of(cls, outcomes: Iterable[float]) -> GroupResult:
        """Of one outcome or more; the sums do not depend on their order."""
        ordered = sorted(outcomes)
        return cls(len(ordered), sum(ordered), sum(one * one for one in ordered))

    def __add__(self, other: GroupResult) -> GroupResult:
        return GroupResult(self.samples + other.samples, self.total + other.total, self.squares + other.squares)

    @property
    def pass_rate(self) -> float:
        return self.total / self.samples

    @property
    def all_right(self) -> bool:
        return self.total == self.samples

    @property
    def all_wrong(self) -> bool:
        return self.total == 0

    @property
    def deviation(self) -> float:
        """The sample standard deviation (n - 1); 0 of one sample."""
        if self.samples < 2:
            return 0.0
        return sqrt(max(0.0, self.squares - self.total**2 / self.samples) / (self.samples - 1))


@dataclass(frozen=True, slots=True)
class PromptHistory:
    """A prompt's name, and the results of its groups, oldest first."""

    prompt: str
    groups: tuple[GroupResult, ...] = ()

    @property
    def all_samples(self) -> GroupResult | None:
        """All samples of all its groups together; None where it has none."""
        if not self.groups:
            return None
        return sum(self.groups[1:], self.groups[0])


class PromptHistories:
    """The histories of all prompts. Owned state: the results by the prompts' names."""

    def __init__(self) -> None:
        self.groups: dict[str, tuple[GroupResult, ...]] = {}

    def of(self, prompt: str) -> PromptHistory:
        return PromptHistory(prompt, self.groups.get(prompt, ()))

    def add(self, prompt: str, result: GroupResult) -> None:
        self.groups[prompt] = (*self.groups.get(prompt, ()), result)

    def state_dict(self) -> dict[str, list[list[float]]]:
        """By prompt the three numbers of each result."""
        return {
            prompt: [[one.samples, one.total, one.squares] for one in results]
            for prompt, results in self.groups.items()
        }

    def load_state_dict(self, state: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        self.groups = {
            prompt: tuple(GroupResult(int(samples), float(total), float(squares)) for samples, total, squares in rows)
            for prompt, rows in state.items()
        }


@dataclass(frozen=True)
class FinishedGroup:
    """A group whose samples have all ended; `history` is of the prompt's earlier groups.

    `first` is how many samples it had when it was reopened, None while it was not.
    """

    history: PromptHistory
    result: GroupResult
    first: int | None = None


@dataclass(frozen=True)
class SamplingView:
    """`samples` is what a prompt gets by default, `rollout.n`; `offered` are the prompts to be submitted next."""

    samples: int
    offered: tuple[PromptHistory, ...] = ()
    finished: tuple[FinishedGroup, ...] = ()


@dataclass(frozen=True)
class GroupVerdict:
    """What becomes of a finished group: `extra` samples before it is judged again, or dropped for the reason `drop`.

    With neither it is trained.
    """

    extra: int = 0
    drop: str = ""


TRAIN_IT = GroupVerdict()


@dataclass(frozen=True)
class SamplingDecision:
    """How many samples each of the offered prompts gets, 0 to leave it out; what becomes of each finished group."""

    samples: tuple[int, ...]
    groups: tuple[GroupVerdict, ...]


class Sampler:
    """By itself, every prompt gets the default number of samples, and every group is trained.

    `decide` may remember, and `state_dict` has all that it remembers. `OPTIONS` are the settings that the constructor
    takes. `REOPENS`: it may give a group more samples. `VARIES`: groups are of different sizes.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ()
    REOPENS: ClassVar[bool] = False
    VARIES: ClassVar[bool] = True

    def decide(self, view: SamplingView) -> SamplingDecision:
        samples = tuple(self._samples(view.offered, view.samples)) if view.offered else ()
        return SamplingDecision(samples, tuple(self._judge(group) for group in view.finished))

    def _samples(self, offered: Sequence[PromptHistory], default: int) -> Sequence[int]:
        return [default] * len(offered)

    def _judge(self, group: FinishedGroup) -> GroupVerdict:
        return TRAIN_IT

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
