"""Describes a run to simulate: its devices, machine, workload and scheduler.

- A `MachineProfile` holds measured times: an engine's rates, training, switching, the host's work.
- A `SimulatedWorkload` says how long generations are, how many turns there are, and how long tools take.
- A `Scheduler` says how generation and training take turns: verl's modes, or ours.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeAlias

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending import LendingPolicy, StepBoundary, lending_policy
from seamless_verl.resources.lending.policy import Tag
from seamless_verl.resources.tail_batching import TailBatching, extra_prompts

ONE_CORE: Mapping[int, float] = {1: 475, 2: 868, 4: 1566, 8: 2536, 16: 3880, 32: 7014, 64: 8431}
"""Tokens/s at c calls in flight: a model of 3.3M parameters, one engine on one core."""


@dataclass(frozen=True)
class MachineProfile:
    """All times are in seconds; by default the host's work does not take the devices' time.

    `rates` are tokens/s of one engine by its running calls. `train_token_s` is device-seconds of training per token,
    prompts included; `train_fixed_s` is added to every mini-batch on every device. `host_s` is the host's work on a
    mini-batch before devices compute, `dispatch_s` the time from a prompt's submission to its first token,
    `collect_s` from a group's end until it is ready. A call that was cut continues once its tokens have been computed
    again, at `prefill_token_s` each. `host_token_s` is host work per generated token that takes the devices' own
    time, spread evenly over them: the front ends beside the engines on the same cores; 0 on accelerators. `sync_s` is
    a weight update, during which no device works.
    """

    rates: Mapping[int, float] = field(default_factory=lambda: ONE_CORE)
    train_token_s: float = 2.9 / 8044
    train_fixed_s: float = 0.0
    switch_to_rollout_s: float = 0.01
    switch_to_train_s: float = 0.01
    sync_s: float = 0.1
    host_s: float = 0.04
    dispatch_s: float = 0.05
    collect_s: float = 0.02
    prefill_token_s: float = 0.05e-3
    host_token_s: float = 0.0

    def rate(self, calls: int) -> float:
        """Tokens/s of one engine, from the seconds per decoding step, interpolated linearly."""
        return calls / self.decode_s(calls) if calls else 0.0

    def decode_s(self, calls: int) -> float:
        """Seconds in which each of `calls` gets one token."""
        points = [(c, c / rate) for c, rate in sorted(self.rates.items())]
        after = bisect_left(points, (calls, 0.0))
        right = min(max(after, 1), len(points) - 1)
        (c0, s0), (c1, s1) = points[right - 1], points[right]
        return s0 + (s1 - s0) * (calls - c0) / (c1 - c0)


MACHINES: Mapping[str, MachineProfile] = {
    "devices": MachineProfile(),
    # host work and dispatch are fitted to verl's modes on two cores, not measured: they include everything that slows
    # devices beside the unit rates; the switch is a pause that keeps calls
    "two_cores": MachineProfile(host_token_s=0.22e-3, dispatch_s=0.4),
}


def machine_named(name: str) -> MachineProfile:
    """The machine of that name; raises ConfigError with the valid names."""
    if name not in MACHINES:
        raise ConfigError("machine", name, "there is no such machine", f"Choose one of {sorted(MACHINES)}")
    return MACHINES[name]


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """One call: the tokens it generates, and the seconds a tool takes before the next one."""

    tokens: int
    tool_s: float = 0.0


Turns: TypeAlias = tuple[SimulatedTurn, ...]
"""The turns of one sample."""


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """Lengths are lognormal by turn: `median` and `cap` in tokens, `sigma` of the logarithm.

    A batch is `prompts` groups of `samples`. Between turns a tool takes lognormal seconds with mean
    `tool_mean_s` and `tool_sigma`. `prompt_tokens` of each sample are trained and counted, but not generated.
    `pass_rates` are the prompts of the data, of which a sampler needs at least one.
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
    pass_rates: tuple[float, ...] = ()

    def group(self, seed: int, number: int, *, first: int = 0, last: int | None = None) -> list[Turns]:
        """The samples from `first` to before `last` of group `number`, the same under every scheduler and sampler."""
        draw = Random(f"{seed}/{number}")
        samples = self.samples if last is None else last
        drawn = [tuple(self._turn(draw, last=i == self.turns - 1) for i in range(self.turns)) for _ in range(samples)]
        return drawn[first:]

    def _turn(self, draw: Random, *, last: bool) -> SimulatedTurn:
        tokens = min(self.cap, max(1, round(draw.lognormvariate(math.log(self.median), self.sigma))))
        if last or self.tool_mean_s == 0:
            return SimulatedTurn(tokens)
        mu = math.log(self.tool_mean_s) - self.tool_sigma**2 / 2
        return SimulatedTurn(tokens, draw.lognormvariate(mu, self.tool_sigma))


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


VERL_RESUME_S = 1.0  # its client sleeps that long before it continues a cut call
BOTH = frozenset({Tag.TRAIN, Tag.ROLLOUT})
TRAIN, ROLLOUT = frozenset({Tag.TRAIN}), frozenset({Tag.ROLLOUT})


@dataclass(frozen=True)
class Scheduler:
    """How generation and training take turns.

    `updates` mini-batches a step are each taken as soon as their groups are ready. `ahead` batches are submitted
    beyond the current one, at most `max_staleness`. `enforce_bound`: the staleness bound also holds training back for
    old groups, and not only limits how many are outstanding; `drop` drops those groups instead of waiting for them.
    `oldest_first` gives seats to the groups submitted first, else to the calls that arrived first. `carry` overrides
    the policy on whether the calls of a reclaimed device move to others; a cut call is submitted again after
    `carry_s`. `cut_at_sync` cuts all calls at a weight update. `prefetch` lets the host work on the next mini-batch
    while devices compute. `early_pause` reclaims before the host's work on a mini-batch, as verl does, else only for
    the computation. `tail_batching` is the share of extra prompts of a step, None for none.
    """

    policy: str = "marginal"
    max_staleness: int = 1
    updates: int = 4
    ahead: float | None = None
    enforce_bound: bool = True
    drop: bool = False
    oldest_first: bool = True
    carry: bool | None = None
    carry_s: float = 0.02
    cut_at_sync: bool = False
    prefetch: bool = False
    early_pause: bool = False
    share: float = 1.0
    tail_batching: float | None = None

    def __post_init__(self) -> None:
        if self.tail_batching is not None and self.max_staleness:
            way_out = "Set max_staleness to 0, or leave it out"
            raise ConfigError("tail_batching", self.tail_batching, "defers what an older token could be of", way_out)
        if self.policy == "never" and self.carry is False:
            way_out = "Set carry, or choose another policy"
            raise ConfigError(
                "carry", self.carry, "calls frozen on a device that never generates again end never", way_out
            )
        if self.ahead is not None and not 0 <= self.ahead <= self.max_staleness:
            way_out = f"Give 0 to {self.max_staleness}, or raise max_staleness"
            raise ConfigError("ahead", self.ahead, "the staleness bound has no room for it", way_out)

    @property
    def batches_ahead(self) -> float:
        return self.max_staleness if self.ahead is None else self.ahead

    def new_tail_batching(self, prompts: int) -> TailBatching:
        """For steps of so many prompts."""
        return TailBatching(extra_prompts(self.tail_batching, prompts))

    def new_policy(self) -> LendingPolicy:
        return StepBoundary(share=self.share) if self.policy == "step_boundary" else lending_policy(self.policy)


VERL_COMMON = Scheduler(
    enforce_bound=False, carry=True, cut_at_sync=True, carry_s=VERL_RESUME_S, early_pause=True, oldest_first=False
)
"""What verl's modes have in common."""

COLOCATE = replace(VERL_COMMON, policy="step_boundary", updates=1)
SYNC = replace(COLOCATE, max_staleness=0, enforce_bound=True)
SEPARATE = replace(VERL_COMMON, policy="never")
SWITCHING = replace(VERL_COMMON, policy="step_boundary", share=0.4)

SCHEDULERS: Mapping[str, Scheduler] = {
    "sync": SYNC,
    "colocate_async": COLOCATE,
    "separate_async": SEPARATE,
    "separate_async_switch": SWITCHING,
    "seamless": Scheduler(),
}
"""verl's modes, and ours."""


@dataclass(frozen=True)
class Scenario:
    """`devices` are sets of tags; `seats` calls run at once in an engine; the first `warmup` steps are not measured.

    `sampler` is one of algorithms/samplers/ with `sampler_options`, None gives each prompt the workload's samples.
    """

    workload: SimulatedWorkload
    devices: tuple[frozenset[str], ...] = (BOTH, ROLLOUT)
    scheduler: Scheduler = field(default_factory=Scheduler)
    machine: MachineProfile = field(default_factory=MachineProfile)
    seats: int = 32
    steps: int = 40
    warmup: int = 3
    seed: int = 1
    sampler: str | None = None
    sampler_options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tag in (Tag.TRAIN, Tag.ROLLOUT):
            if not any(tag in tags for tags in self.devices):
                raise ConfigError(
                    "devices", _format_devices(self.devices), f"no device is tagged {tag}", f"Tag one {tag}"
                )
        if self.workload.prompts % self.scheduler.updates:
            raise ConfigError(
                "updates",
                self.scheduler.updates,
                f"{self.workload.prompts} prompts do not divide into as many mini-batches",
                "Give a divisor of the prompts",
            )
        if self.sampler is not None and not self.workload.pass_rates:
            way_out = "Give the prompts pass rates from 0 to 1"
            raise ConfigError("sampler", self.sampler, "the workload has no pass rates to go by", way_out)
        if not 0 <= self.warmup < self.steps:
            raise ConfigError("steps", self.steps, f"{self.warmup} of them are warm-up", "Give more steps")


def _format_devices(devices: tuple[frozenset[str], ...]) -> str:
    return " ".join("+".join(sorted(tags)) for tags in devices)
