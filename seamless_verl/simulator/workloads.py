"""Workloads as data: how long generations are, how many turns, and how long tools take between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from seamless_verl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Turn:
    """One call: the tokens it generates, and the seconds a tool takes before the next one."""

    tokens: int
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths are lognormal by turn: `median` and `cap` in tokens, `sigma` of the logarithm.

    A batch is `prompts` groups of `samples`. Between turns a tool takes lognormal seconds with mean
    `tool_mean_s` and `tool_sigma`. `prompt_tokens` of each sample are trained and counted, but not generated.
    """

    prompts: int = 16
    samples: int = 4
    median: float = 60.0
    sigma: float = 0.3
    cap: int = 1792
    turns: int = 1
    tool_mean_s: float = 0.0
    tool_sigma: float = 1.0
    prompt_tokens: int = 13

    def group(self, seed: int, number: int) -> list[tuple[Turn, ...]]:
        """The samples of prompt `number`: the same ones under every scheduler."""
        draw = Random(f"{seed}/{number}")
        return [
            tuple(self._turn(draw, last=i == self.turns - 1) for i in range(self.turns)) for _ in range(self.samples)
        ]

    def _turn(self, draw: Random, *, last: bool) -> Turn:
        tokens = min(self.cap, max(1, round(draw.lognormvariate(math.log(self.median), self.sigma))))
        if last or self.tool_mean_s == 0:
            return Turn(tokens)
        mu = math.log(self.tool_mean_s) - self.tool_sigma**2 / 2
        return Turn(tokens, draw.lognormvariate(mu, self.tool_sigma))


WORKLOADS: Mapping[str, Workload] = {
    "w1": Workload(),
    "w1_wide": Workload(sigma=0.9, cap=768),
    "w2": Workload(median=50.0, sigma=1.3),
    # a turn of 62.8 tokens takes 0.29 s in an engine with 32 calls in flight: so does a tool, on average
    "w3": Workload(turns=4, tool_mean_s=0.29),
}


def workload(name: str) -> Workload:
    """The workload of that name; raises ConfigError with the names there are."""
    if name not in WORKLOADS:
        raise ConfigError("workload", name, "there is no such workload", f"Choose one of {sorted(WORKLOADS)}")
    return WORKLOADS[name]
