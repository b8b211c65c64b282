"""What a simulated run generates: how long generations are, how many turns there are, and how long tools take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from seamless_verl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """One call: the tokens it generates, the seconds a tool takes before the next one, and the tokens of its result."""

    tokens: int
    tool_s: float = 0.0
    tool_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """Lengths are lognormal by turn: `median` and `cap` in tokens, `sigma` of the logarithm.

    A batch is `prompts` groups of `samples`. Between turns a tool takes lognormal seconds with mean
    `tool_mean_s` and `tool_sigma`, and its result has `tool_tokens`. Those and the `prompt_tokens` of each sample are
    trained and counted, but not generated.
    """

    prompts: int = 16
    samples: int = 4
    median: float = 60.0
    sigma: float = 0.3
    cap: int = 1792
    turns: int = 1
    tool_mean_s: float = 0.0
    tool_sigma: float = 1.0
    tool_tokens: int = 0
    prompt_tokens: int = 13

    def group(self, seed: int, number: int) -> list[tuple[SimulatedTurn, ...]]:
        """The samples of prompt `number`, the same under every scheduler."""
        draw = Random(f"{seed}/{number}")
        return [
            tuple(self._turn(draw, last=i == self.turns - 1) for i in range(self.turns)) for _ in range(self.samples)
        ]

    def _turn(self, draw: Random, *, last: bool) -> SimulatedTurn:
        tokens = min(self.cap, max(1, round(draw.lognormvariate(math.log(self.median), self.sigma))))
        if last:
            return SimulatedTurn(tokens)
        if self.tool_mean_s == 0:
            return SimulatedTurn(tokens, tool_tokens=self.tool_tokens)
        mu = math.log(self.tool_mean_s) - self.tool_sigma**2 / 2
        return SimulatedTurn(tokens, draw.lognormvariate(mu, self.tool_sigma), self.tool_tokens)


WORKLOADS: Mapping[str, SimulatedWorkload] = {
    "w1": SimulatedWorkload(),
    "w1_wide": SimulatedWorkload(sigma=0.9, cap=768),
    "w2": SimulatedWorkload(median=50.0, sigma=1.3),
    # a turn of 62.8 tokens takes 0.29 s in an engine with 32 calls in flight: so does a tool, on average
    "w3": SimulatedWorkload(turns=4, tool_mean_s=0.29),
}


def workload_named(name: str) -> SimulatedWorkload:
    """The workload of that name; raises ConfigError with the valid names."""
    if name not in WORKLOADS:
        raise ConfigError("workload", name, "there is no such workload", f"Choose one of {sorted(WORKLOADS)}")
    return WORKLOADS[name]
