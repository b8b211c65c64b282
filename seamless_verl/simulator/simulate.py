"""Run a scenario in virtual time."""

from __future__ import annotations

from seamless_verl.resources.lending import LendingPolicy
from seamless_verl.resources.staleness import StalenessBound
from seamless_verl.simulator.device import Device
from seamless_verl.simulator.groups import Groups
from seamless_verl.simulator.lender import Lender
from seamless_verl.simulator.records import Records
from seamless_verl.simulator.result import Result
from seamless_verl.simulator.samples import Sample
from seamless_verl.simulator.scenario import Scenario
from seamless_verl.simulator.trainer import Trainer
from seamless_verl.simulator.world import World


class Simulation:
    """A scenario under way; `policy` replaces the one its scheduler names."""

    def __init__(self, scenario: Scenario, *, policy: LendingPolicy | None = None) -> None:
        scheduler, work = scenario.scheduler, scenario.workload
        self.scenario, self.policy = scenario, policy or scheduler.fresh_policy()
        bound = StalenessBound(scheduler.max_staleness, work.prompts // scheduler.updates, scheduler.updates)
        self.groups = Groups(bound, heed=scheduler.heed)
        devices = [Device.fresh(f"d{i}", tags, scenario.seats) for i, tags in enumerate(scenario.devices)]
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

    def _ended(self, sample: Sample) -> None:
        self.trainer.ended(sample)

    def _priority(self, sample: Sample, order: int) -> tuple[int, ...]:
        return (sample.group.submitted, sample.group.number) if self.scenario.scheduler.oldest_first else (order,)


def simulate(scenario: Scenario) -> Result:
    """The result of one run; the same for the same scenario, seed included."""
    return Simulation(scenario).run()
