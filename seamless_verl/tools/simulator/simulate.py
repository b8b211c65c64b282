"""Runs a scenario in virtual time, measures it, and compares it with a run in which no device is ever idle."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from seamless_verl.resources.ahead import StalenessBound
from seamless_verl.resources.lending.policy import LendingPolicy
from seamless_verl.tools.simulator.cluster import VirtualCluster
from seamless_verl.tools.simulator.controllers import AheadControl, LendingController
from seamless_verl.tools.simulator.engine import SimulatedDevice, SimulatedEngine, SimulatedSample, SimulatedUse
from seamless_verl.tools.simulator.groups import PromptGroups, SimulatedPrompts
from seamless_verl.tools.simulator.scenario import Scenario
from seamless_verl.tools.simulator.trainer import Measurements, SimulatedTrainer


@dataclass(frozen=True)
class Result:
    """Figures of the measured steps; rates are over all devices."""

    tokens_per_s: float  # prompts and replies, as verl's throughput counts
    generated_per_s: float
    step_s: float
    longest_step_s: float
    bound_step_s: float  # if no device ever waited, engines with every seat taken: a bound on what scheduling reaches
    idle_share: float
    held_share: float  # of time in which training waited only for an old group
    dropped_share: float  # of all generated tokens
    max_staleness: int  # in steps, from submission to training
    max_token_age: int  # in weight versions, from a sample's first token to its training
    mean_token_age: float
    lendings_per_step: float
    shares: dict[str, dict[str, float]]  # of each device's time, by kind
    samples: dict[str, float] = field(default_factory=dict)  # with a sampler: mean size of a group, by pass rate

    @property
    def of_bound(self) -> float:
        """The bound's step as a share of this run's; 1 is a run without idle time."""
        return self.bound_step_s / self.step_s

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "of_bound": self.of_bound}

    @classmethod
    def of(cls, scenario: Scenario, measured: Measurements, policy: LendingPolicy) -> Result:
        steps, seconds = len(measured.step_ends), measured.measured_seconds()
        wall = measured.step_ends[-1] - measured.started_at
        ends = [measured.started_at, *measured.step_ends]
        lent = sum(count for name, count in policy.metrics().items() if name.startswith("lending/lent"))
        return cls(
            tokens_per_s=measured.trained_tokens / wall,
            generated_per_s=measured.tokens / wall,
            step_s=wall / steps,
            longest_step_s=max(end - begin for begin, end in pairwise(ends)),
            bound_step_s=bound_s(scenario, measured) / steps,
            idle_share=sum(of[SimulatedUse.IDLE] for of in seconds) / wall / len(seconds),
            held_share=measured.held_s / wall,
            dropped_share=measured.dropped_tokens / (measured.dropped_tokens + measured.tokens),
            max_staleness=measured.max_staleness,
            max_token_age=measured.max_token_age,
            mean_token_age=measured.age_tokens / measured.tokens,
            lendings_per_step=lent / scenario.steps,
            shares={
                device.name: {kind.value: of[kind] / wall for kind in SimulatedUse}
                for device, of in zip(measured.cluster.devices, seconds, strict=True)
            },
        )


def bound_s(scenario: Scenario, measured: Measurements) -> float:
    """Seconds the measured tokens would take with no device ever idle, at unit rates."""
    machine = scenario.machine
    best = max(machine.rate(calls) for calls in range(1, scenario.seats + 1))
    training = machine.train_s(measured.trained_tokens, measured.trained_rows, measured.repeated_tokens)
    return (training + measured.tokens / best) / len(scenario.devices)


class Simulation:
    """One run of a scenario; `policy` replaces the one its scheduler names."""

    def __init__(self, scenario: Scenario, *, policy: LendingPolicy | None = None) -> None:
        scheduler, workload = scenario.scheduler, scenario.workload
        self.scenario, self.policy = scenario, policy or scheduler.new_policy()
        bound = StalenessBound(scheduler.max_staleness, workload.prompts // scheduler.updates, scheduler.updates)
        defers = scheduler.tail_batching is not None
        self.groups = PromptGroups(bound, enforce_bound=scheduler.enforce_bound and not defers)
        devices = [
            SimulatedDevice(
                f"d{i}", tags, SimulatedEngine(scenario.seats, scenario.machine.prefill_token_s, scheduler.keep_cache)
            )
            for i, tags in enumerate(scenario.devices)
        ]
        self.cluster = VirtualCluster(
            scenario.machine,
            devices,
            on_ended=lambda sample: self.trainer.on_call_ended(sample),
            priority=self._priority,
            carry_s=scheduler.carry_s,
        )
        self.measurements = Measurements(self.cluster, scenario.warmup)
        self.lending = LendingController(self.cluster, self.groups, self.policy, scheduler)
        self.prompts = SimulatedPrompts(scenario)
        self.ahead = AheadControl(self.cluster, scheduler)
        self.trainer = SimulatedTrainer(
            scenario, self.cluster, self.groups, self.lending, self.measurements, self.prompts, self.ahead
        )

    def run(self) -> Result:
        """Run to the last step. Raises IntegrityError when seconds or groups do not add up."""
        run_steps = self.trainer.run_steps()
        waits_for = next(run_steps, None)
        while waits_for is not None:
            while waits_for is not None and waits_for():
                waits_for = next(run_steps, None)
            self.lending.apply_policy()
            self.cluster.place_waiting()
            if waits_for is not None and not waits_for():
                self._advance()
        self.measurements.check_integrity()
        self.groups.check_integrity()
        if self.prompts.sampling is not None:
            self.prompts.sampling.check_integrity()
        result = Result.of(self.scenario, self.measurements, self.policy)
        return replace(result, samples=self.prompts.sizes_by_pass_rate())

    def _advance(self) -> None:
        collecting = self.lending.due_at is None and not self.cluster.syncing
        if collecting:
            self.ahead.look()
        else:
            self.ahead.use.wait_ended()
        held = collecting and self.groups.held(self.trainer.step, self.lending.update)
        before = self.cluster.now
        self.cluster.advance()
        if held and self.measurements.measuring:
            self.measurements.held_s += self.cluster.now - before

    def _priority(self, sample: SimulatedSample, order: int) -> tuple[int, ...]:
        return (sample.group.submitted, sample.group.number) if self.scenario.scheduler.oldest_first else (order,)


def simulate(scenario: Scenario) -> Result:
    """The result of one run; the same for the same scenario, seed included."""
    return Simulation(scenario).run()
