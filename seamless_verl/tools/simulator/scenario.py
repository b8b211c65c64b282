"""Describes a run to simulate: its devices, machine, workload and scheduler, and which of its replicas die.

A `Scheduler` says how generation and training take turns: verl's modes, or ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending import lending_policy
from seamless_verl.resources.lending.policy import LendingPolicy, StepBoundary, Tag
from seamless_verl.resources.tail_batching import TailBatching, extra_prompts
from seamless_verl.tools.simulator.machine import MachineProfile
from seamless_verl.tools.simulator.workload import SimulatedWorkload

HOUR_S = 3600.0
MOST_DEATHS = HOUR_S  # an hour: one a second
VERL_RESUME_S = 1.0  # its client sleeps that long before it continues a cut call
BOTH = frozenset({Tag.TRAIN, Tag.ROLLOUT})
TRAIN, ROLLOUT = frozenset({Tag.TRAIN}), frozenset({Tag.ROLLOUT})


@dataclass(frozen=True)
class Scheduler:
    """How generation and training take turns; a step has so many local `updates`, a mini-batch of its prompts each."""

    policy: str = "marginal"
    max_staleness: int = 1
    updates: int = 4  # verl's parameter_sync_step; a mini-batch is taken as soon as its groups are ready
    ahead: float | None = None  # batches submitted beyond the current one; None: max_staleness
    finds_ahead: bool = False  # as many as a run finds with seamless.ahead=null
    enforce_bound: bool = True  # hold training back for old groups too, not only limit how many are outstanding
    drop: bool = False  # drop old groups instead of waiting for them
    oldest_first: bool = True  # seats are for the groups submitted first, else for the calls that arrived first
    carry: bool | None = None  # overrides the policy on whether calls of a reclaimed device move to others
    carry_s: float = 0.02  # until a cut call is submitted again
    cut_at_sync: bool = False  # cut all calls at a weight update
    prefetch: bool = False  # the host works on the next mini-batch while devices compute
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
        if self.policy == "never" and self.carry is False:
            way_out = "Set carry, or choose another policy"
            raise ConfigError(
                "carry", self.carry, "calls frozen on a device that never generates again end never", way_out
            )
        if self.finds_ahead and self.ahead is not None:
            raise ConfigError("ahead", self.ahead, "is found while the run goes on", "Leave one of the two out")
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
class Deaths:
    """Deaths of replicas: drawn from the run's seed, so many an hour in the whole cluster, and `at` (seconds, device).

    Intervals are exponential, victims are uniform. A dead replica's calls continue on others. It is back after
    `restart_s`, with the committed weights. A device that also trains goes on training.
    """

    per_hour: float = 0.0
    restart_s: float = 60.0
    at: tuple[tuple[float, int], ...] = ()

    def __post_init__(self) -> None:
        for key, value, most in (
            ("deaths_per_hour", self.per_hour, MOST_DEATHS),
            ("restart_s", self.restart_s, HOUR_S),
        ):
            if not 0 <= value <= most:
                raise ConfigError(key, value, "it is out of its bounds", f"Give 0 to {most:g}")

    def check(self, devices: Sequence[frozenset[str]]) -> None:
        """Raises ConfigError for a death that cannot be one of these devices'."""
        for at_s, device in self.at:
            text = f"{at_s:g}:{device}"
            if not (math.isfinite(at_s) and at_s >= 0):
                raise ConfigError("--death", text, "that is no time of the run", "Give 0 seconds or more")
            if not 0 <= device < len(devices):
                raise ConfigError("--death", text, f"there is no device {device}", f"Give 0 to {len(devices) - 1}")
            if Tag.ROLLOUT not in devices[device]:
                raise ConfigError(
                    "--death", text, f"device {device} does not generate", "Choose a device tagged rollout"
                )


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
    deaths: Deaths = field(default_factory=Deaths)
    sampler: str | None = None  # one of algorithms/samplers; None gives each prompt the workload's samples
    sampler_options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tag in (Tag.TRAIN, Tag.ROLLOUT):
            if not any(tag in tags for tags in self.devices):
                text = " ".join("+".join(sorted(tags)) for tags in self.devices)
                raise ConfigError("devices", text, f"no device is tagged {tag}", f"Tag one {tag}")
        self.deaths.check(self.devices)
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
