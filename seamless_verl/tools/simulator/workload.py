"""What a simulated run generates: how long generations are, how many turns there are, and how long tools take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from seamless_verl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """One call: the tokens it generates, the seconds a tool takes before the next one, and the tokens of its result."""

    tokens: int
    tool_s: float = 0.0
    tool_tokens: int = 0


Turns: TypeAlias = tuple[SimulatedTurn, ...]
"""The turns of one sample."""


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """A batch is `prompts` groups of `samples`. A turn's tokens and a tool's seconds after it are lognormal."""

    prompts: int = 16
    samples: int = 4
    median: float = 60.0  # tokens of a turn
    sigma: float = 0.3  # of the logarithm
    cap: int = 1792  # tokens of a turn, at most
    turns: int = 1
    tool_mean_s: float = 0.0
    tool_sigma: float = 1.0
    tool_tokens: int = 0  # of a result: trained and counted, but not generated, as are those of prompts
    prompt_tokens: int = 13
    bench: str = ""  # of the training bench: lengths are drawn by their place as there, whatever the seed
    pass_rates: tuple[float, ...] = ()  # the prompts of the data, of which a sampler needs at least one

    def group(self, seed: int, number: int, *, first: int = 0, last: int | None = None) -> list[Turns]:
        """The samples from `first` to before `last` of group `number`, the same under every scheduler and sampler."""
        samples = self.samples if last is None else last
        if self.bench:
            return [self._bench_sample(f"{self.bench}/{number}/{sample}") for sample in range(first, samples)]
        draw = Random(f"{seed}/{number}")
        drawn = [
            tuple(self._turn(draw, draw, last=i == self.turns - 1) for i in range(self.turns)) for _ in range(samples)
        ]
        return drawn[first:]

    def _bench_sample(self, place: str) -> Turns:
        places = [f"{place}/{i}" for i in range(self.turns)]
        return tuple(self._turn(Random(f"{at}/tokens"), Random(f"{at}/tool"), last=at is places[-1]) for at in places)

    def _turn(self, tokens: Random, tool: Random, *, last: bool) -> SimulatedTurn:
        drawn = min(self.cap, max(1, round(self.median * math.exp(self.sigma * tokens.gauss(0.0, 1.0)))))
        if last:
            return SimulatedTurn(drawn)
        if self.tool_mean_s == 0:
            return SimulatedTurn(drawn, tool_tokens=self.tool_tokens)
        median = self.tool_mean_s / math.exp(self.tool_sigma**2 / 2)
        return SimulatedTurn(drawn, median * math.exp(self.tool_sigma * tool.gauss(0.0, 1.0)), self.tool_tokens)


WORKLOADS: Mapping[str, SimulatedWorkload] = {
    "w1": SimulatedWorkload(cap=256, prompt_tokens=8),
    "w1_wide": SimulatedWorkload(sigma=0.9, cap=768),
    "w2": SimulatedWorkload(median=50.0, sigma=1.3, prompt_tokens=8),
    # a tool takes as long as a turn of an engine with half of a step's samples in flight
    "w3": SimulatedWorkload(
        sigma=0.8, cap=448, turns=4, tool_mean_s=0.58, tool_sigma=0.8, tool_tokens=16, prompt_tokens=8
    ),
    # a large batch of mathematics with answers of up to 8k tokens, for clusters
    "math": SimulatedWorkload(prompts=512, samples=8, median=1800.0, sigma=0.9, cap=8192, prompt_tokens=500),
}


def workload_named(name: str) -> SimulatedWorkload:
    """The workload of that name; raises ConfigError with the valid names."""
    if name not in WORKLOADS:
        raise ConfigError("workload", name, "there is no such workload", f"Choose one of {sorted(WORKLOADS)}")
    return WORKLOADS[name]
