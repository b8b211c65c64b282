"""What is known of each prompt: the results of its groups that have ended. Pure.

Invariant: a result is added once, when its group's last sample has been judged; results are never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any


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
