"""A prompt's samples on their way through engines and tools, and the weight versions of their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from seamless_verl.simulator.workloads import Turn


@dataclass(eq=False)
class Sample:
    """One session: its turns, how far it has come, and how old its tokens are."""

    group: Group
    turns: tuple[Turn, ...]
    turn: int = 0
    left: float = 0.0
    cut: bool = False
    first_version: int | None = None
    generated: float = 0.0
    version_tokens: float = 0.0

    def __post_init__(self) -> None:
        self.left = float(self.turns[0].tokens)

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def recomputed(self) -> float:
        """Tokens of its own that an engine must compute again before it goes on."""
        before = sum(turn.tokens for turn in self.turns[: self.turn + 1])
        return before - self.left if self.cut else 0.0

    def produce(self, tokens: float, version: int) -> None:
        """Tokens generated on one weight version."""
        self.generated += tokens
        self.version_tokens += tokens * version

    def next_turn(self) -> bool:
        """Go on to the next turn; False after the last one."""
        self.turn += 1
        if self.turn == len(self.turns):
            return False
        self.left = float(self.turns[self.turn].tokens)
        return True


@dataclass(eq=False)
class Group:
    """The samples of one prompt; `submitted` is the step in which it was."""

    number: int
    submitted: int
    samples: list[Sample] = field(default_factory=list)
    unfinished: int = 0

    @classmethod
    def of(cls, number: int, submitted: int, samples: list[tuple[Turn, ...]]) -> Group:
        group = cls(number, submitted, unfinished=len(samples))
        group.samples = [Sample(group, turns) for turns in samples]
        return group

    @property
    def tokens(self) -> int:
        """Generated tokens of all its samples."""
        return sum(sample.tokens for sample in self.samples)
