"""What a simulated run came to, and how far it stayed from a run without bubbles.

Run a scenario in virtual time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from seamless_verl.resources.lending import LendingPolicy
from seamless_verl.resources.staleness import StalenessBound
from seamless_verl.simulator.engine import SimulatedDevice, SimulatedSample, SimulatedUse
from seamless_verl.simulator.records import Records
from seamless_verl.simulator.scenario import Scenario
from seamless_verl.simulator.trainer import Groups, Lender, Trainer
from seamless_verl.simulator.world import World


@dataclass(frozen=True)
class Result:
    """Over the measured steps.

    `tokens_per_s` counts prompts and replies, as verl's throughput does, over all devices. `bound_step_s` is the
    step if every device computed or generated all the time, engines with every seat taken: a bound on what
    scheduling can reach. `shares` are of each device's time, by kind. `max_staleness` is in steps from
    submission to training, `max_token_age` in weight versions from a sample's first token to its training,
    `mean_token_age` the same per token. `held_share` is the time training waited for an old group only,
    `dropped_share` the part of all generated tokens that was given up.
    """

    tokens_per_s: float
    step_s: float
    longest_step_s: float
    bound_step_s: float
    idle_share: float
    held_share: float
    dropped_share: float
    max_staleness: int
    max_token_age: int
    mean_token_age: float
    lendings_per_step: float
    shares: dict[str, dict[str, float]]

    @property
    def of_bound(self) -> float:
        """The bound's step as a share of this one's; 1 is a run without bubbles."""
        return self.bound_step_s / self.step_s

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "of_bound": self.of_bound}

    @classmethod
    def of(cls, scenario: Scenario, records: Records, groups: Groups, policy: LendingPolicy) -> Result:
        steps, spent = len(records.step_ends), records.spent()
        wall = records.step_ends[-1] - records.began
        lent = sum(count for name, count in policy.metrics().items() if name.startswith("lending/lent"))
        return cls(
            tokens_per_s=records.trained_tokens / wall,
            step_s=wall / steps,
            longest_step_s=max(end - begin for begin, end in pairwise([records.began, *records.step_ends])),
            bound_step_s=bound_s(scenario, records) / steps,
            idle_share=sum(seconds[SimulatedUse.IDLE] for seconds in spent) / wall / len(spent),
            held_share=records.held_s / wall,
            dropped_share=records.dropped_tokens / (records.dropped_tokens + records.tokens),
            max_staleness=records.max_staleness,
            max_token_age=records.max_token_age,
            mean_token_age=records.age_tokens / records.tokens,
            lendings_per_step=lent / scenario.steps,
            shares={
                device.name: {kind.value: seconds[kind] / wall for kind in SimulatedUse}
                for device, seconds in zip(records.world.devices, spent, strict=True)
            },
        )


def bound_s(scenario: Scenario, records: Records) -> float:
    """Seconds the measured tokens would take with no device ever idle, at unit rates."""
    machine = scenario.machine
    best = max(machine.rate(calls) for calls in range(1, scenario.seats + 1))
    training = records.trained_tokens * machine.train_token_s
    fixed = machine.train_fixed_s * scenario.scheduler.updates * len(records.step_ends)
    return (training + records.tokens / best) / len(scenario.devices) + fixed


class Simulation:
    """A scenario under way; `policy` replaces the one its scheduler names."""

    def __init__(self, scenario: Scenario, *, policy: LendingPolicy | None = None) -> None:
        scheduler, work = scenario.scheduler, scenario.workload
        self.scenario, self.policy = scenario, policy or scheduler.fresh_policy()
        bound = StalenessBound(scheduler.max_staleness, work.prompts // scheduler.updates, scheduler.updates)
        self.groups = Groups(bound, heed=scheduler.heed)
        devices = [SimulatedDevice.fresh(f"d{i}", tags, scenario.seats) for i, tags in enumerate(scenario.devices)]
        self.world = World(
            scenario.machine, devices, on_ended=self._ended, priority=self._priority, carry_s=scheduler.carry_s
        )
        self.records = Records(self.world, scenario.warmup, work.prompt_tokens)
        self.lender = Lender(self.world, self.groups, self.policy, carry=scheduler.carry)
        self.trainer = Trainer(scenario, self.world, self.groups, self.lender, self.records)

    def run(self) -> Result:
        """To the last step. Raises IntegrityError when seconds or groups do not add up."""
        script = self.trainer.script()
        waits_for = next(script, None)
        while waits_for is not None:
            while waits_for is not None and waits_for():
                waits_for = next(script, None)
            self.lender.consult()
            self.world.place()
            if waits_for is not None and not waits_for():
                self._advance()
        self.records.check_integrity()
        self.groups.check_integrity()
        return Result.of(self.scenario, self.records, self.groups, self.policy)

    def _advance(self) -> None:
        collecting = self.lender.due_at is None and not self.world.syncing
        held = collecting and self.groups.held(self.trainer.step, self.lender.update)
        before = self.world.now
        self.world.advance()
        if held:
            self.records.held(self.world.now - before)

    def _ended(self, sample: SimulatedSample) -> None:
        self.trainer.ended(sample)

    def _priority(self, sample: SimulatedSample, order: int) -> tuple[int, ...]:
        return (sample.group.submitted, sample.group.number) if self.scenario.scheduler.oldest_first else (order,)


def simulate(scenario: Scenario) -> Result:
    """The result of one run; the same for the same scenario, seed included."""
    return Simulation(scenario).run()
