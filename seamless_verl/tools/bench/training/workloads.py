"""The workloads: how long each response is and each tool takes, as a function of the sample's place alone.

Lengths are forced, so that all arms generate the same tokens count for count: a draw is seeded by
(workload, the prompt's index in the data set, the sample within its group, turn), never by time or arrival.
Pure: numbers only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from seamless_verl.errors import ConfigError

PROMPT_TOKENS = 64
"""Longest prompt, in tokens."""


@dataclass(frozen=True)
class Lognormal:
    """A lognormal distribution by its median and the standard deviation of its logarithm."""

    median: float
    sigma: float

    @property
    def mean(self) -> float:
        """The mean of the uncut distribution."""
        return self.median * math.exp(self.sigma**2 / 2)

    @classmethod
    def with_mean(cls, mean: float, sigma: float) -> Lognormal:
        return cls(mean / math.exp(sigma**2 / 2), sigma)

    def draw(self, seed: str) -> float:
        return self.median * math.exp(self.sigma * random.Random(seed).gauss(0.0, 1.0))


@dataclass(frozen=True)
class ForcedTurn:
    """One turn of a sample: tokens to generate, then the seconds a tool takes and the tokens of its result."""

    tokens: int
    wait_s: float = 0.0
    tool_tokens: int = 0


@dataclass(frozen=True)
class Workload:
    """Lengths of turns in tokens, from 1 to `longest`; `tool` in seconds between two turns of a sample."""

    name: str
    what: str
    tokens: Lognormal
    longest: int
    turns: int = 1
    tool: Lognormal | None = None
    tool_tokens: int = 0
    prompts: int = 16
    samples: int = 4
    seats: int = 64

    @property
    def step_samples(self) -> int:
        return self.prompts * self.samples

    @property
    def response_tokens(self) -> int:
        """Longest response: the tokens of all turns and of their tools' results."""
        return self.turns * self.longest + (self.turns - 1) * self.tool_tokens

    @property
    def tool_tokens_of_step(self) -> int:
        """Response tokens of a step that no engine generated."""
        return self.step_samples * (self.turns - 1) * self.tool_tokens

    def turn(self, index: int, session: int, turn: int) -> ForcedTurn:
        """The `turn`-th turn of sample `session` of the prompt at `index`, all from 0."""
        seed = f"{self.name}/{index}/{session}/{turn}"
        tokens = min(self.longest, max(1, round(self.tokens.draw(f"{seed}/tokens"))))
        if self.tool is None or turn == self.turns - 1:
            return ForcedTurn(tokens)
        return ForcedTurn(tokens, self.tool.draw(f"{seed}/tool"), self.tool_tokens)

    def sample(self, index: int, session: int) -> list[ForcedTurn]:
        return [self.turn(index, session, turn) for turn in range(self.turns)]

    def turn_s(self, rates: Mapping[int, float], engines: int) -> float:
        """Seconds of generation of a mean turn while a step's samples are spread over `engines`; `rates` are tokens/s
        of an engine alone by samples in flight."""
        in_flight = self.step_samples // engines
        return round(self.tokens.mean * in_flight / rates[in_flight], 3)

    def with_turn(self, turn_s: float) -> Workload:
        """The workload with tools that take `turn_s` on the mean, as long as a turn."""
        return self if self.tool is None else replace(self, tool=Lognormal.with_mean(turn_s, self.tool.sigma))

    def generated(self, prompts: range) -> int:
        """Tokens that all samples of the prompts at these indices generate."""
        return sum(
            turn.tokens for index in prompts for session in range(self.samples) for turn in self.sample(index, session)
        )


TURN_S = 0.38
"""Seconds of generation of a mean turn of `w3` where it was not measured: 83 tokens at 4.6 ms."""

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("w1", "even lengths", Lognormal(60, 0.3), longest=256),
        Workload("w2", "a long tail, a whole step in flight at once", Lognormal(50, 1.3), longest=1792),
        Workload(
            "w2_heavy",
            "a heavier tail: half of all tokens are in samples of 390 or more",
            Lognormal(40, 1.6),
            longest=1920,
        ),
        Workload(
            "w3",
            "four turns, between them tools that take as long as a turn",
            Lognormal(60, 0.8),
            longest=448,
            turns=4,
            tool=Lognormal.with_mean(TURN_S, 0.8),
            tool_tokens=16,
        ),
    )
}


def workload_named(name: str) -> Workload:
    """The workload of that name; ConfigError for an unknown name."""
    if name not in WORKLOADS:
        raise ConfigError("--workload", name, "there is no such workload", f"Choose one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name]
