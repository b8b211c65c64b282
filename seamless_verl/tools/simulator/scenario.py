"""Describes a run to simulate: its workload, devices, machine and scheduler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeAlias

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending import lending_policy
from seamless_verl.resources.lending.policy import LendingPolicy, StepBoundary, Tag
from seamless_verl.tools.simulator.machine import MachineProfile

VERL_RESUME_S = 1.0  # its client sleeps that long before it continues a cut call
BOTH = frozenset({Tag.TRAIN, Tag.ROLLOUT})
TRAIN, ROLLOUT = frozenset({Tag.TRAIN}), frozenset({Tag.ROLLOUT})


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

    @property
    def repeated_tokens(self) -> int:
        """Of a batch, the prompts that another sample of their group has too."""
        return self.prompts * (self.samples - 1) * self.prompt_tokens

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


AGENTS = SimulatedWorkload(
    prompts=8, samples=8, median=40.0, sigma=0.6, cap=256, turns=4, tool_mean_s=0.38, tool_sigma=0.8, tool_tokens=32,
    prompt_tokens=488,
)  # fmt: skip
WORKLOADS: Mapping[str, SimulatedWorkload] = {
    "w1": SimulatedWorkload(cap=256, prompt_tokens=8),
    "w1_wide": SimulatedWorkload(sigma=0.9, cap=768),
    "w2": SimulatedWorkload(median=50.0, sigma=1.3, prompt_tokens=8),
    # a tool takes as long as a turn of an engine with half of a step's samples in flight
    "w3": SimulatedWorkload(
        sigma=0.8, cap=448, turns=4, tool_mean_s=0.58, tool_sigma=0.8, tool_tokens=16, prompt_tokens=8
    ),
    "agents": AGENTS,
    # a large batch of mathematics with answers of up to 8k tokens, for clusters
    "math": SimulatedWorkload(prompts=512, samples=8, median=1800.0, sigma=0.9, cap=8192, prompt_tokens=500),
}


@dataclass(frozen=True)
class Scheduler:
    """How generation and training take turns; a step has so many local `updates`, a mini-batch of its prompts each."""

    policy: str = "marginal"
    max_staleness: int = 1
    updates: int = 4  # verl's parameter_sync_step; a mini-batch is taken as soon as its groups are ready
    ahead: float | None = None  # batches submitted beyond the current one; None: max_staleness
    finds_ahead: bool = False  # as many as a run finds with seamless.ahead=null
    enforce_bound: bool = True  # hold training back for old groups too, not only limit how many are outstanding
    oldest_first: bool = True  # seats are for the groups submitted first, else for the calls that arrived first
    carry: bool = False  # calls of a reclaimed device move to others, whatever the policy says
    carry_s: float = 0.02  # until a cut call is submitted again
    cut_at_sync: bool = False  # cut all calls at a weight update
    early_pause: bool = False  # reclaim before the host's work on a mini-batch, as verl does, not for computation only
    refill: bool = True  # submit before each update, not only when a step begins
    keep_cache: bool = False  # keep over a weight update what engines have computed
    rolling: bool = True  # engines generate while a weight update is made
    poll_s: float = 0.0  # how often finished groups are noticed while training waits; 0: at once
    look_s: float = 0.0  # between two questions to the policy meanwhile, at least
    share: float = 1.0  # of the devices that step_boundary lends
    tail_batching: float | None = None  # extra prompts that a step begins; then none is submitted for a later step

    def __post_init__(self) -> None:
        if self.tail_batching is not None and self.max_staleness:
            way_out = "Set max_staleness to 0, or leave it out"
            raise ConfigError("tail_batching", self.tail_batching, "defers what an older token could be of", way_out)
        if self.finds_ahead and self.ahead is not None:
            raise ConfigError("ahead", self.ahead, "is found while the run goes on", "Leave one of the two out")
        if self.ahead is not None and not 0 <= self.ahead <= self.max_staleness:
            way_out = f"Give 0 to {self.max_staleness}, or raise max_staleness"
            raise ConfigError("ahead", self.ahead, "the staleness bound has no room for it", way_out)

    @property
    def batches_ahead(self) -> float:
        return self.max_staleness if self.ahead is None else self.ahead

    def new_policy(self) -> LendingPolicy:
        return StepBoundary(share=self.share) if self.policy == "step_boundary" else lending_policy(self.policy)


VERL_COMMON = Scheduler(
    enforce_bound=False,
    carry=True,
    cut_at_sync=True,
    carry_s=VERL_RESUME_S,
    early_pause=True,
    oldest_first=False,
    refill=False,
    rolling=False,
)
"""What verl's modes have in common."""

COLOCATE = replace(VERL_COMMON, policy="step_boundary", updates=1)
SCHEDULERS: Mapping[str, Scheduler] = {
    "sync": replace(COLOCATE, max_staleness=0, enforce_bound=True),
    "colocate_async": COLOCATE,
    "separate_async": replace(VERL_COMMON, policy="never"),
    "separate_async_switch": replace(VERL_COMMON, policy="step_boundary", share=0.4),
    "seamless": Scheduler(),
}
"""verl's modes, and ours."""


@dataclass(frozen=True)
class Scenario:
    """One run. A device may stand for several that work as one: a replica of them, and as many ranks of the trainer.

    The machine's times are then of such a unit.
    """

    workload: SimulatedWorkload
    devices: tuple[frozenset[str], ...] = (BOTH, ROLLOUT)  # the tags of each
    scheduler: Scheduler = field(default_factory=Scheduler)
    machine: MachineProfile = field(default_factory=MachineProfile)
    seats: int = 32  # calls that run at once in an engine
    steps: int = 40
    warmup: int = 3  # first steps that are not measured
    seed: int = 1
    sampler: str | None = None  # one of algorithms/samplers; None gives each prompt the workload's samples
    sampler_options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tag in (Tag.TRAIN, Tag.ROLLOUT):
            if not any(tag in tags for tags in self.devices):
                text = " ".join("+".join(sorted(tags)) for tags in self.devices)
                raise ConfigError("devices", text, f"no device is tagged {tag}", f"Tag one {tag}")
        prompts, updates = self.workload.prompts, self.scheduler.updates
        if prompts % updates:
            reason = f"{prompts} prompts do not divide into as many local updates"
            raise ConfigError("updates", updates, reason, "Give a divisor of the prompts")
        if self.sampler is not None and not self.workload.pass_rates:
            way_out = "Give the prompts pass rates from 0 to 1"
            raise ConfigError("sampler", self.sampler, "the workload has no pass rates to go by", way_out)
        if self.sampler is not None and self.scheduler.tail_batching is not None:
            reason = "tail batching drops prompts that it may reopen"
            raise ConfigError("sampler", self.sampler, reason, "Leave one of them out")
        if not 0 <= self.warmup < self.steps:
            raise ConfigError("steps", self.steps, f"{self.warmup} of them are warm-up", "Give more steps")
